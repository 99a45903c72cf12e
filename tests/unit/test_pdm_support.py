# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from pdm import BehaviorSupport

INF = math.inf


def log(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_sampled_among_the_top_entries_leaves_the_last_column_unused() -> None:
    support = BehaviorSupport.from_topk(
        torch.tensor([[13, 382, 5]]),
        log([[0.5, 0.2, 0.1]]),
        torch.tensor([382]),
        log([[0.2]]).squeeze(-1),
    )
    assert support.token_ids.tolist() == [[13, 382, 5, -1]]
    assert support.valid.tolist() == [[True, True, True, False]]
    assert support.log_probs[0, 3] == -INF
    assert support.sampled_column.tolist() == [1]
    torch.testing.assert_close(support.sampled_log_probs.exp(), torch.tensor([0.2]).double())
    torch.testing.assert_close(support.tail_prob, torch.tensor([0.2]).double())


def test_sampled_outside_the_top_entries_gets_its_own_column() -> None:
    # An all-False match whose argmax is 0 would read the first entry's log-probability instead.
    support = BehaviorSupport.from_topk(
        torch.tensor([[13, 382, 5]]),
        log([[0.5, 0.2, 0.1]]),
        torch.tensor([7]),
        log([[0.05]]).squeeze(-1),
    )
    assert support.token_ids.tolist() == [[13, 382, 5, 7]]
    assert support.sampled_column.tolist() == [3]
    torch.testing.assert_close(support.sampled_log_probs.exp(), torch.tensor([0.05]).double())
    torch.testing.assert_close(support.tail_prob, torch.tensor([0.15]).double())


def test_sampled_is_found_by_id_wherever_it_ranks() -> None:
    # The engine may put the sampled token first although it ranks fourth.
    support = BehaviorSupport.from_topk(
        torch.tensor([[382, 13]]),
        torch.tensor([[-4.20, -0.71]]),
        torch.tensor([382]),
        torch.tensor([-4.20]),
    )
    assert support.sampled_log_probs.tolist() == pytest.approx([-4.20])


def test_the_sampled_log_prob_is_the_one_stored() -> None:
    support = BehaviorSupport.from_topk(
        torch.tensor([[6, 2]]),
        torch.tensor([[-1.0, -2.0]]),
        torch.tensor([2]),
        torch.tensor([-2.125]),
    )
    assert support.log_probs.tolist() == [[-1.0, -2.125, -INF]]


def test_repeated_and_padding_entries_count_once_or_not_at_all() -> None:
    # K + 1 entries as an engine may send them: sampled first, and again at its rank.
    support = BehaviorSupport.from_topk(
        torch.tensor([[9, 4, 9, 0, -1]]),
        torch.tensor([[0.25, 0.5, 0.25, 0.0, 0.125]]).log(),  # 0 has log-prob -inf: padding
        torch.tensor([9]),
        torch.tensor([0.25]).log(),
    )
    assert support.token_ids.tolist() == [[9, 4, -1, -1, -1, -1]]
    assert support.log_probs[0, 2:].tolist() == [-INF] * 4
    torch.testing.assert_close(support.tail_prob, torch.tensor([0.25]))


def test_binary_support() -> None:
    support = BehaviorSupport.from_sampled(torch.tensor([3, 8]), torch.tensor([0.25, 1.0]).log())
    assert support.token_ids.tolist() == [[3], [8]]
    assert support.sampled.tolist() == [3, 8]
    torch.testing.assert_close(support.tail_prob, torch.tensor([0.75, 0.0]))


def test_tail_mass_stays_within_zero_and_one() -> None:
    ids = torch.tensor([[1, 2], [1, 2], [-1, -1]])
    log_probs = torch.tensor([[0.7, 0.4], [0.5, 0.5], [0.5, 0.5]]).log()
    support = BehaviorSupport(ids, log_probs, torch.tensor([1, 1, -1]))
    assert support.tail_prob.tolist() == pytest.approx([0.0, 0.0, 1.0], abs=1e-7)
    assert (support.tail_prob >= 0).all()


def test_tiny_tail_survives_next_to_a_dominant_token() -> None:
    # mu = 1 - 3e-12: float32 stores its logarithm well, but 1 - mu would be 0.
    log_probs = torch.tensor([[-3e-12, math.log(1e-12)]])
    support = BehaviorSupport(torch.tensor([[4, 5]]), log_probs, torch.tensor([4]))
    assert support.tail_prob.item() == pytest.approx(2e-12, rel=1e-5, abs=0)


def test_absent_sampled_token_reads_nan_not_a_neighbour() -> None:
    support = BehaviorSupport.from_topk(
        torch.tensor([[6, 2]]),
        torch.tensor([[-1.0, -2.0]]),
        torch.tensor([-1]),
        torch.tensor([-0.5]),
    )
    assert support.token_ids.tolist() == [[6, 2, -1]]
    assert support.sampled_column.tolist() == [-1]
    assert support.sampled_log_probs.isnan().all()


def test_nan_from_the_engine_stays_visible() -> None:
    support = BehaviorSupport.from_topk(
        torch.tensor([[6, 2]]),
        torch.tensor([[-1.0, math.nan]]),
        torch.tensor([6]),
        torch.tensor([-1.0]),
    )
    assert support.valid.tolist() == [[True, True, False]]
    assert support.tail_prob.isnan().all()


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes_and_leading_shapes(stored: torch.dtype, expected: torch.dtype) -> None:
    ids = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
    log_probs = torch.full((2, 3, 4), -2.0, dtype=stored)
    support = BehaviorSupport.from_topk(ids, log_probs, ids[..., 1], log_probs[..., 1])
    assert support.token_ids.shape == (2, 3, 5)
    assert support.token_ids.dtype == torch.int64
    assert support.log_probs.dtype == support.tail_prob.dtype == expected
    assert (support.sampled_column == 1).all()


def test_inputs_are_not_changed() -> None:
    ids, log_probs = torch.tensor([[4, 4]]), torch.tensor([[-1.0, -1.0]])
    BehaviorSupport.from_topk(ids, log_probs, torch.tensor([4]), torch.tensor([-1.5]))
    assert ids.tolist() == [[4, 4]]
    assert log_probs.tolist() == [[-1.0, -1.0]]


def test_no_tokens() -> None:
    support = BehaviorSupport.from_topk(
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0),
    )
    assert support.tail_prob.shape == (0,)
    assert support.sampled_log_probs.shape == (0,)


def test_wrong_shapes_and_dtypes_say_what_arrived() -> None:
    ids, values = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    one, log_prob = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    with pytest.raises(ValueError, match=r"topk_log_probs must have shape \(2, 3\), got \(2, 4\)"):
        BehaviorSupport.from_topk(ids, torch.zeros(2, 4), one, log_prob)
    with pytest.raises(ValueError, match=r"sampled_ids must have shape \(2,\), got \(3,\)"):
        BehaviorSupport.from_topk(ids, values, torch.zeros(3, dtype=torch.int64), log_prob)
    with pytest.raises(ValueError, match=r"topk_ids must be an integer tensor, got torch.float32"):
        BehaviorSupport.from_topk(values, values, one, log_prob)
    with pytest.raises(ValueError, match="sampled_log_probs must be floating point"):
        BehaviorSupport.from_topk(ids, values, one, one)
    with pytest.raises(ValueError, match=r"token_ids must be int64, got torch.int32"):
        BehaviorSupport(ids.int(), values, one)
    with pytest.raises(ValueError, match="log_probs must be float32 or float64"):
        BehaviorSupport(ids, values.half(), one)
    with pytest.raises(ValueError, match="S >= 1"):
        BehaviorSupport(ids[:, :0], values[:, :0], one)
