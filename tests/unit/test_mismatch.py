# SPDX-License-Identifier: Apache-2.0
"""The mismatch metrics and their split, against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch

from megatron.rl.metrics import gather_records
from megatron.rl.mismatch import MismatchSplit, select
from megatron.rl.policy.head import TokenRecord
from tests.unit.token_records import record

LOG2, LOG3 = math.log(2), math.log(3)

# Two sequences of three tokens and one: log pi - log mu is log 2, 0, -log 2 and log 2.
TOKENS = record(
    [4, 4, 4, 9],
    [-2 * LOG2, -LOG2, -LOG2, -2 * LOG2],
    [-LOG2, -LOG2, -2 * LOG2, -LOG2],
    topk_kl=[0.1, 0.2, 0.3, 0.4],
    divergence=[9.0] * 4,
    entropy=[1.0, 0.4, 3.0, 4.0],
)
# (e^l - 1 - l) of l = log 2, 0, -log 2, log 2.
K3 = (2 * (1 - LOG2) + (LOG2 - 0.5)) / 4


def test_a_part_by_hand() -> None:
    metrics = MismatchSplit(0).measure(TOKENS)
    expected = {
        "kl": -LOG2 / 4,
        "k3": K3,
        "k3_max": 1 - LOG2,
        "log_prob_mean": LOG2 * 3 / 4,
        "log_prob_max": LOG2,
        "prob_mean": 0.1875,
        "prob_max": 0.25,
        "topk_kl": 0.25,
        "topk_kl_max": 0.4,
        # Per sequence 0 and -log 2.
        "log_ppl_diff": -LOG2 / 2,
    }
    for part in ("total", "engine"):  # the first step has the weights that sampled
        for name, value in expected.items():
            assert metrics[f"mismatch/{part}/{name}"] == pytest.approx(value), (part, name)


def test_aliases_by_hand() -> None:
    """As their projects compute them: see the names in the docstring of the module under test."""
    metrics = MismatchSplit(0).measure(TOKENS)
    third = 2 ** (4 / 3)  # both perplexities of the first sequence
    expected = {
        "rollout_corr/kl": -LOG2 / 4,
        "rollout_corr/k3_kl": K3,
        "rollout_corr/training_ppl": (third + 2) / 2,
        "rollout_corr/training_log_ppl": LOG2 * (4 / 3 + 1) / 2,
        "rollout_corr/rollout_ppl": (third + 4) / 2,
        "rollout_corr/rollout_log_ppl": LOG2 * (4 / 3 + 2) / 2,
        "rollout_corr/log_ppl_diff": -LOG2 / 2,
        "rollout_corr/log_ppl_abs_diff": LOG2 / 2,
        "rollout_corr/log_ppl_diff_max": 0.0,
        "rollout_corr/log_ppl_diff_min": -LOG2,
        "rollout_corr/ppl_ratio": (1 + 0.5) / 2,
        "rollout_corr/chi2_token": (4 + 1 + 0.25 + 4) / 4 - 1,
        # Products of ratios over the sequences: 1 and 2.
        "rollout_corr/chi2_seq": (1 + 4) / 2 - 1,
        "training/rollout_probs_diff_max": 0.25,
        "training/rollout_probs_diff_mean": 0.1875,
        # Of 1/4, 0, 1/4, 1/4, with n - 1 below the sum of squares: sqrt(3 * (1/16)^2 + (3/16)^2)
        # over sqrt 3.
        "training/rollout_probs_diff_std": 0.125,
        "token_mult_prob_error": (2 + 1 + 2 + 2) / 4,
        "gen_kl_error": K3,
        "mismatch_kl/mean": K3,
        "mismatch_kl/max": 1 - LOG2,
        "actor/topk_kl_mean": 0.25,  # not the configured divergence
        "actor/topk_kl_max": 0.4,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-12), name


def test_one_token_has_no_deviation() -> None:
    metrics = MismatchSplit(0).measure(record([0], [-1.0], [-2.0]))
    assert metrics["training/rollout_probs_diff_std"] == 0.0


def test_buckets_hold_what_their_names_say() -> None:
    """Position 16, counted from 1, is in the first bucket and 17 in the second."""
    tokens = record(
        [0] * 4 + [1],
        [0.0] * 5,
        [-1.0, -2.0, -4.0, -8.0, -16.0],
        position=[15, 16, 4096, 63, 64],
        topk_kl=[1.0, 2.0, 3.0, 4.0, 5.0],
        entropy=[0.0, 0.01, 0.5, 0.51, 7.0],
    )
    metrics = MismatchSplit(0).measure(tokens)
    kl = {
        name[len("mismatch/total/kl/") :]: v for name, v in metrics.items() if "total/kl/" in name
    }
    assert kl == {
        "position_1_16": 1.0,
        "position_17_64": 5.0,  # 2 and 8
        "position_65_256": 16.0,
        "position_over_4096": 4.0,
        "entropy_0_0.01": 1.5,
        "entropy_0.1_0.5": 4.0,
        "entropy_0.5_1": 8.0,
        "entropy_over_2": 16.0,
    }
    assert metrics["mismatch/total/topk_kl/position_17_64"] == 3.0
    assert metrics["mismatch/total/prob_max/position_1_16"] == pytest.approx(1 - math.exp(-1))
    assert metrics["mismatch/total/prob_max/entropy_0_0.01"] == pytest.approx(1 - math.exp(-2))
    assert metrics["mismatch/share/position_17_64"] == pytest.approx(0.4)
    shares = [value for name, value in metrics.items() if "/share/entropy" in name]
    assert sum(shares) == pytest.approx(1.0) and len(shares) == 4


def test_a_bucket_of_the_perplexity_gap_averages_over_sequences() -> None:
    """Sequence 0 has gaps 1 and 3 in the bucket, 1 has 5, 2 none: (2 + 5) / 2, not 3."""
    tokens = record([0, 0, 1, 2], [0.0] * 4, [-1.0, -3.0, -5.0, -7.0], position=[0, 1, 0, 99])
    metrics = MismatchSplit(0).measure(tokens)
    assert metrics["mismatch/total/log_ppl_diff/position_1_16"] == pytest.approx(3.5)
    assert metrics["mismatch/total/kl/position_1_16"] == pytest.approx(3.0)


def test_later_steps_differ_from_the_first_by_the_update() -> None:
    split = MismatchSplit(0)
    first = split.measure(record([0, 0], [-1.0, -1.0], [-1.5, -1.1], topk_kl=[0.2, 0.4]))
    later = split.measure(
        record([1, 1], [-1.0, -3.0], [-2.0, -4.0], topk_kl=[0.5, 0.9], position=[0, 16])
    )
    assert first["mismatch/update/kl"] == 0.0
    for name in ("mismatch/engine/kl", "mismatch/engine/k3_max", "gen_kl_error"):
        assert later[name] == first[name], name
    assert later["mismatch/total/kl"] == pytest.approx(1.0)
    assert later["mismatch/engine/kl"] == pytest.approx(0.3)
    assert later["mismatch/update/kl"] == pytest.approx(0.7)
    assert later["mismatch/update/log_ppl_diff"] == pytest.approx(0.7)
    assert later["mismatch/update/topk_kl"] == pytest.approx(0.7 - 0.3)
    assert later["mismatch/update/kl/position_1_16"] == pytest.approx(1.0 - 0.3)
    # Nothing to compare with: the engine was not measured there. And maxima do not add up.
    assert "mismatch/update/kl/position_17_64" not in later
    assert not [
        name for name in later if name.startswith(("mismatch/update/k3", "mismatch/update/prob"))
    ]


# Behavior, sampling weights and policy give these tokens 1/2, 1/3 and 1/4, and 1/4, 1/2 and 1/4.
BEFORE = record(
    [5, 5, 8], [-LOG2, -2 * LOG2, -1.0], [-LOG3, -LOG2, -1.0], topk_kl=[0.01, 0.02, 0.03]
)
AFTER = record(
    [5, 5], [-LOG2, -2 * LOG2], [-2 * LOG2, -2 * LOG2], topk_kl=[0.05, 0.01], entropy=[0.2, 3.0]
)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_exact_split_by_hand(order: list[int]) -> None:
    split = MismatchSplit(0, select(BEFORE, torch.tensor(order)))
    metrics = split.measure(select(AFTER, torch.tensor([1, 0])))
    expected = {
        "engine/kl": (LOG3 - LOG2 - LOG2) / 2,
        "update/kl": (2 * LOG2 - LOG3 + LOG2) / 2,
        "total/kl": LOG2 / 2,
        "engine/log_prob_max": LOG2,
        "update/log_prob_max": LOG2,
        "engine/prob_max": 0.25,
        "update/prob_max": 0.25,
        "engine/prob_mean": (1 / 6 + 1 / 4) / 2,
        "update/prob_mean": (1 / 12 + 1 / 4) / 2,
        # l = log(3/4) and -log 2.
        "update/k3": ((0.75 - 1 - math.log(0.75)) + (0.5 - 1 + LOG2)) / 2,
        "update/topk_kl": (0.04 - 0.01) / 2,
        "update/topk_kl_max": 0.04,
        "engine/topk_kl": 0.015,
        "update/kl/entropy_0.1_0.5": 2 * LOG2 - LOG3,
        "engine/kl/entropy_over_2": -LOG2,
    }
    for name, value in expected.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(value), name
    # The names that others measure at the sampling weights: ratios 2/3 and 2.
    assert metrics["token_mult_prob_error"] == pytest.approx((1.5 + 2) / 2)
    assert metrics["gen_kl_error"] == pytest.approx((2 / 3 - 1 - math.log(2 / 3) + 1 - LOG2) / 2)


def test_parts_add_up_in_every_bucket() -> None:
    tokens = _random_tokens(500)
    engine = torch.randn(500, dtype=torch.float64) * 0.1
    before = dataclasses.replace(tokens, policy_log_prob=tokens.behavior_log_prob + engine)
    metrics = MismatchSplit(0, before).measure(tokens)
    names = [name for name in metrics if name.startswith("mismatch/total/")]
    checked = 0
    for name in names:
        if name.split("/")[2] in ("kl", "log_ppl_diff", "topk_kl"):
            both = [metrics[name.replace("total", part)] for part in ("engine", "update")]
            assert sum(both) == pytest.approx(metrics[name], abs=1e-12), name
            checked += 1
    assert checked >= 3 * 9


def test_unknown_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="every token of a step"):
        MismatchSplit(0, BEFORE).measure(record([6], [0.0], [0.0]))
    with pytest.raises(ValueError, match="every token of a step"):
        MismatchSplit(0, BEFORE).measure(record([8], [0.0], [0.0], position=[1]))


@pytest.mark.parametrize("exact", [False, True])
def test_stale_tokens_are_not_the_engines(exact: bool) -> None:
    """The second token is of earlier weights: its distance is the updates' alone."""
    tokens = record([0, 0], [-1.0, -1.0], [-1.5, -4.0], policy_version=[3, 2])
    metrics = MismatchSplit(3, tokens if exact else None).measure(tokens)
    assert metrics["mismatch/total/kl"] == pytest.approx(1.75)
    assert metrics["mismatch/engine/kl"] == pytest.approx(0.5)
    assert metrics["mismatch/engine/log_prob_max"] == pytest.approx(0.5)
    assert metrics["mismatch/update/kl"] == pytest.approx(0.0 if exact else 1.25)
    stale = MismatchSplit(4, tokens if exact else None).measure(tokens)
    assert not [name for name in stale if "engine" in name or "update" in name]


@pytest.mark.parametrize("exact", [False, True])
def test_no_tokens_give_no_metrics(exact: bool) -> None:
    assert MismatchSplit(0, BEFORE if exact else None).measure(record([], [], [])) == {}


def test_micro_batches_do_not_matter() -> None:
    """Whole sequences or parts of them, in any order: the numbers are the batch's."""
    tokens = _random_tokens(300)
    shuffled = torch.randperm(300)
    parts = [select(tokens, rows) for rows in shuffled.split([7, 0, 200, 93])]
    for reference in (None, tokens):
        whole = MismatchSplit(0, reference).measure(tokens)
        joined = MismatchSplit(0, reference).measure(gather_records(parts, None))
        assert joined == pytest.approx(whole, rel=1e-12, abs=1e-15)


def _random_tokens(count: int) -> TokenRecord:
    generator = torch.Generator().manual_seed(3)
    sequence = torch.randint(0, 6, (count,), generator=generator).tolist()
    behavior = torch.randn(count, generator=generator, dtype=torch.float64).abs().neg()
    policy = behavior + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    return record(
        sequence,
        behavior.tolist(),
        policy.tolist(),
        topk_kl=torch.rand(count, generator=generator).tolist(),
        entropy=(3 * torch.rand(count, generator=generator)).tolist(),
    )
