# SPDX-License-Identifier: Apache-2.0
"""Metrics against numbers worked out by hand."""

import math

import pytest
import torch

from megatron.rl.metrics import gather_records, loss_metrics, mismatch_metrics
from megatron.rl.policy.head import TokenRecord

LOG2 = math.log(2)


def record(sequence: list[int], behavior: list[float], policy: list[float], **more) -> TokenRecord:  # type: ignore[no-untyped-def]
    count = len(sequence)
    flags = {
        name: torch.tensor(more.get(name, [False] * count), dtype=torch.bool)
        for name in ("outside", "outward")
    }
    return TokenRecord(
        sequence=torch.tensor(sequence),
        behavior_log_prob=torch.tensor(behavior),
        policy_log_prob=torch.tensor(policy),
        divergence=torch.tensor(more.get("divergence", [0.0] * count)),
        entropy=torch.tensor(more.get("entropy", [0.0] * count)),
        keep=~(flags["outside"] & flags["outward"]),
        certified=None,
        accepted=more.get("accepted"),
        **flags,
    )


# Two sequences of three tokens and one: log pi - log mu is log 2, 0, -log 2 and log 2.
TOKENS = record(
    [4, 4, 4, 9],
    [-2 * LOG2, -LOG2, -LOG2, -2 * LOG2],
    [-LOG2, -LOG2, -2 * LOG2, -LOG2],
    outside=[True, True, False, True],
    outward=[True, False, True, True],
    divergence=[0.1, 0.2, 0.3, 0.4],
    entropy=[1.0, 2.0, 3.0, 4.0],
)


def test_loss_metrics_by_hand() -> None:
    metrics = loss_metrics(TOKENS)
    assert metrics["ppo_kl"] == pytest.approx(-LOG2 / 4)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["outside_fraction"] == 0.75
    # Mean over sequences, not over tokens: (0 + log 2) / 2.
    assert metrics["ppl_gap"] == pytest.approx(LOG2 / 2)
    assert metrics["entropy"] == 2.5
    assert metrics["divergence/mean"] == pytest.approx(0.25)
    assert metrics["divergence/max"] == pytest.approx(0.4)
    assert metrics["divergence/p50"] == pytest.approx(0.25)
    assert metrics["is_masked_high"] == 0.5 and metrics["is_masked_low"] == 0.0
    assert metrics["ratio/max"] == pytest.approx(2.0)
    assert metrics["ratio/min"] == pytest.approx(0.5)
    assert metrics["tokens"] == 4 and metrics["vetoed_tokens"] == 2


def test_mismatch_metrics_by_hand() -> None:
    metrics = mismatch_metrics(TOKENS)
    assert metrics["rollout_corr/kl"] == pytest.approx(-LOG2 / 4)
    # r - 1 - log r: 2 - 1 - log 2 twice, 0, 1/2 - 1 + log 2.
    k3 = (2 * (1 - LOG2) + (LOG2 - 0.5)) / 4
    for name in ("rollout_corr/k3_kl", "gen_kl_error", "mismatch_kl/mean"):
        assert metrics[name] == pytest.approx(k3)
    assert metrics["mismatch_kl/max"] == pytest.approx(1 - LOG2)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((4 + 1 + 0.25 + 4) / 4 - 1)
    # Perplexities 2**(4/3) and 2 under both, 2**(4/3) and 4 under mu.
    assert metrics["rollout_corr/training_ppl"] == pytest.approx((2 ** (4 / 3) + 2) / 2)
    assert metrics["rollout_corr/rollout_ppl"] == pytest.approx((2 ** (4 / 3) + 4) / 2)
    assert metrics["rollout_corr/log_ppl_diff"] == pytest.approx(-LOG2 / 2)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.1875)
    assert metrics["token_mult_prob_error"] == pytest.approx((2 + 1 + 2 + 2) / 4)
    assert metrics["mismatch/log_prob_max"] == pytest.approx(LOG2)


def test_means_are_over_tokens_not_over_micro_batches() -> None:
    """Trap 36: 2 tokens of value 1 and 8 of value 4 have mean 3.4, not 2.5."""
    short = record([0] * 2, [0.0] * 2, [0.0] * 2, entropy=[1.0] * 2)
    long = record([1] * 8, [0.0] * 8, [0.0] * 8, entropy=[4.0] * 8)
    assert loss_metrics(gather_records([short, long], None))["entropy"] == pytest.approx(3.4)


def test_no_tokens_give_no_metrics() -> None:
    empty = record([], [], [])
    assert loss_metrics(empty) == {} and mismatch_metrics(empty) == {}


def test_half_the_tokens_of_a_split_sequence_count_once() -> None:
    halves = [record([3], [-LOG2], [-2 * LOG2]), record([3], [-LOG2], [-LOG2])]
    assert loss_metrics(gather_records(halves, None))["ppl_gap"] == pytest.approx(-LOG2 / 2)


def test_acceptance_is_of_sequences_and_by_length() -> None:
    accepted = torch.tensor([True] * 100 + [False])
    tokens = record([0] * 100 + [1], [0.0] * 101, [0.0] * 101, accepted=accepted)
    metrics = loss_metrics(tokens)
    assert metrics["sequence_acceptance"] == 0.5
    assert metrics["sequence_acceptance/up_to_64"] == 0.0
    assert metrics["sequence_acceptance/up_to_256"] == 1.0
    assert "sequence_acceptance/up_to_1024" not in metrics
