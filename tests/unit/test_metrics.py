# SPDX-License-Identifier: Apache-2.0
"""Metrics against numbers worked out by hand."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.rl.metrics import gather_records, loss_metrics, staleness_metrics
from megatron.rl.metrics_log import MetricsLog
from tests.unit.token_records import record

LOG2 = math.log(2)

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


def test_staleness_by_hand() -> None:
    tokens = record([0] * 4, [0.0] * 4, [0.0] * 4, policy_version=[7, 7, 6, 3])
    assert staleness_metrics(tokens, version=7, optimizer_steps=2) == {
        "staleness/mean": 1.25,
        "staleness/max": 4,
        "staleness/optimizer_steps": 2,
        "staleness/lag_0": 0.5,
        "staleness/lag_1": 0.25,
        "staleness/lag_4": 0.25,
    }


def test_what_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("step", 1, {"a": math.nan, "b": 2.0, "c": -math.inf, "n": 3, "name": "x"})
        log.write("step", 2, {"a": 1.0})
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in first and "Infinity" not in first
    assert json.loads(first) == {
        "kind": "step", "number": 1, "a": None, "b": 2.0, "c": None, "n": 3, "name": "x",
        "non_finite": ["a", "c"],
    }  # fmt: skip
    assert json.loads(second) == {"kind": "step", "number": 2, "a": 1.0}


def test_long_lags_are_counted_together() -> None:
    tokens = record([0] * 4, [0.0] * 4, [0.0] * 4, policy_version=[92, 91, 1, 100])
    metrics = staleness_metrics(tokens, version=100, optimizer_steps=0)
    assert metrics["staleness/max"] == 99
    assert metrics["staleness/lag_8_or_more"] == 0.75 and metrics["staleness/lag_0"] == 0.25


def test_means_are_over_tokens_not_over_micro_batches() -> None:
    """Trap 36: 2 tokens of value 1 and 8 of value 4 have mean 3.4, not 2.5."""
    short = record([0] * 2, [0.0] * 2, [0.0] * 2, entropy=[1.0] * 2)
    long = record([1] * 8, [0.0] * 8, [0.0] * 8, entropy=[4.0] * 8)
    assert loss_metrics(gather_records([short, long], None))["entropy"] == pytest.approx(3.4)


def test_no_tokens_give_no_metrics() -> None:
    empty = record([], [], [])
    assert loss_metrics(empty) == {} and staleness_metrics(empty, 1, 0) == {}


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
