# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pdm import token_weights

# Two sequences: 2 tokens of loss 1, 8 tokens of loss 4.
LENGTHS = torch.tensor([2, 8])
IDS = torch.tensor([0] * 2 + [1] * 8)
LOSSES = torch.tensor([1.0] * 2 + [4.0] * 8)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # Fixed length 16: (2 * 1 + 8 * 4) / (2 * 16).
    [("token_mean", 3.4), ("sequence_mean", 2.5), ("sequence_sum_fixed", 34 / 32)],
)
@pytest.mark.parametrize("cuts", [[10], [2, 8], [5, 5], [1, 3, 6]])
def test_the_mean_does_not_depend_on_the_split(
    aggregation: str, expected: float, cuts: list[int]
) -> None:
    total = 0.0
    for ids, losses in zip(IDS.split(cuts), LOSSES.split(cuts), strict=True):
        weights = token_weights(
            ids,
            LENGTHS,
            aggregation=aggregation,
            global_tokens=10,
            global_sequences=2,
            fixed_length=16 if aggregation == "sequence_sum_fixed" else None,
        )
        total += (weights * losses).sum().item()
    assert total / 10 == pytest.approx(expected)


def test_empty_sequences_and_batches() -> None:
    weights = token_weights(
        torch.tensor([0, 1]),
        torch.tensor([0, 3]),
        aggregation="sequence_mean",
        global_tokens=3,
        global_sequences=1,
        dtype=torch.float64,
    )
    assert weights.tolist() == [0.0, 1.0]
    assert weights.dtype == torch.float64
    weights = token_weights(
        torch.tensor([0, 1]),
        torch.tensor([0, 3]),
        aggregation="sequence_sum_fixed",
        global_tokens=3,
        global_sequences=1,
        fixed_length=2,
    )
    assert weights.tolist() == [0.0, 1.5]
    for aggregation in ("token_mean", "sequence_mean"):
        nothing = token_weights(
            IDS, LENGTHS, aggregation=aggregation, global_tokens=0, global_sequences=0
        )
        assert nothing.isfinite().all()


def test_errors_say_what_arrived() -> None:
    good = {"aggregation": "token_mean", "global_tokens": 10, "global_sequences": 2}
    with pytest.raises(ValueError, match=r"aggregation must be one of .* got 'mean'"):
        token_weights(IDS, LENGTHS, **{**good, "aggregation": "mean"})
    with pytest.raises(ValueError, match="must not be negative, got -1 and 2"):
        token_weights(IDS, LENGTHS, **{**good, "global_tokens": -1})
    with pytest.raises(ValueError, match="sequence_ids must be integers"):
        token_weights(LOSSES, LENGTHS, **good)
    with pytest.raises(ValueError, match=r"sequence_lengths must be \[B\], got shape \(1, 2\)"):
        token_weights(IDS, LENGTHS.view(1, 2), **good)


def test_a_token_weighs_the_same_in_a_short_and_in_a_long_sequence() -> None:
    weights = token_weights(
        IDS,
        LENGTHS,
        aggregation="sequence_sum_fixed",
        global_tokens=10,
        global_sequences=2,
        fixed_length=100,
    )
    assert weights.unique().tolist() == pytest.approx([10 / (2 * 100)])


@pytest.mark.parametrize("length", [None, 0, -1, 2.5, True])
def test_a_sum_needs_its_fixed_length(length: object) -> None:
    with pytest.raises(ValueError, match="needs fixed_length, an integer of at least 1"):
        token_weights(
            IDS,
            LENGTHS,
            aggregation="sequence_sum_fixed",
            global_tokens=10,
            global_sequences=2,
            fixed_length=length,
        )


def test_a_fixed_length_without_effect_is_refused() -> None:
    for aggregation in ("token_mean", "sequence_mean"):
        with pytest.raises(ValueError, match="fixed_length=16 has no effect with aggregation="):
            token_weights(
                IDS,
                LENGTHS,
                aggregation=aggregation,
                global_tokens=10,
                global_sequences=2,
                fixed_length=16,
            )
