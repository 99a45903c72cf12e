# SPDX-License-Identifier: Apache-2.0
"""The same packed batch in every small layout against one rank, and one rank against float64.

Gathered weights are those of the checkpoint, bit for bit.
All go through Megatron's own schedule, DistributedDataParallel and finalize_model_grads.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.checkpoints import QWEN3, QWEN3_MOE, write_checkpoint
from tests.parallel.policy_case import Case, Outcome, float64_oracle, run_cases
from tests.parallel.spawn import run_ranks

# Of the gradient's norm, per parameter: float32 rounding through two layers is about 4e-6.
GRADIENT_TOLERANCE = 1e-5
LOG_PROB_TOLERANCE = 1e-5

MODELS = ("dense", "moe", "tied")
TWO_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"tensor": 2}),
    ("dense", {"tensor": 2, "sequence": False}),
    ("dense", {"pipeline": 2}),
    ("dense", {"data": 2}),
    ("moe", {"pipeline": 2}),
    ("moe", {"data": 2}),
    ("moe", {"data": 2, "expert": 2}),
    ("moe", {"tensor": 2}),
    ("moe", {"tensor": 2, "expert": 2}),
    ("dense", {"tensor": 2, "head": "reference"}),
    ("moe", {"tensor": 2, "expert": 2, "head": "reference"}),
    ("tied", {"tensor": 2}),
]
FOUR_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"tensor": 2, "pipeline": 2}),
    ("dense", {"tensor": 2, "data": 2}),
    ("tied", {"tensor": 2, "pipeline": 2}),
    ("moe", {"tensor": 2, "pipeline": 2, "expert": 2}),
    ("moe", {"tensor": 2, "data": 2, "expert": 4}),
]
CONFIGS = {"dense": QWEN3, "moe": QWEN3_MOE, "tied": QWEN3 | {"tie_word_embeddings": True}}


_outcomes: dict[Case, Outcome] = {}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: str(write_checkpoint(root / name, config)) for name, config in CONFIGS.items()}


def _run(*cases: Case) -> list[Outcome]:
    """Run the cases, all of one world size, on one set of ranks; each case once a session."""
    new = [case for case in dict.fromkeys(cases) if case not in _outcomes]
    if new:
        (world_size,) = {case.world_size for case in new}
        _outcomes.update(zip(new, run_ranks(run_cases, world_size, new)[0], strict=True))
    return [_outcomes[case] for case in cases]


@functools.cache
def _oracle(path: str) -> Outcome:
    return float64_oracle(path, Case(path).loss)


def _assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert torch.equal(outcome.keep, expected.keep)
    assert 0 < int(expected.keep.sum()) < expected.keep.numel(), "the mask must do something"
    difference = (outcome.log_probs - expected.log_probs).abs().max()
    assert difference <= LOG_PROB_TOLERANCE
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(outcome.weights[name], weight), f"{name} is not what was loaded"
    assert outcome.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = (outcome.gradients[name].double() - gradient.double()).norm() / gradient.norm()
        assert error <= GRADIENT_TOLERANCE, f"{name}: {error:.2e}"


@pytest.fixture(scope="module")
def one_rank(checkpoints: dict[str, str]) -> dict[str, Outcome]:
    return dict(zip(MODELS, _run(*(Case(checkpoints[model]) for model in MODELS)), strict=True))


@pytest.fixture(scope="module")
def two_ranks(checkpoints: dict[str, str]) -> dict[str, Outcome]:
    """Every layout of two ranks, in one start of two processes."""
    cases = [Case(checkpoints[model], **layout) for model, layout in TWO_RANKS]
    keys = [str(item) for item in TWO_RANKS]
    return dict(zip(keys, _run(*cases), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_matches_a_plain_float64_model(
    checkpoints: dict[str, str], one_rank: dict[str, Outcome], model: str
) -> None:
    _assert_same(one_rank[model], _oracle(checkpoints[model]))


def test_reference_head_on_one_rank(
    checkpoints: dict[str, str], one_rank: dict[str, Outcome]
) -> None:
    outcomes = _run(*(Case(checkpoints[model], head="reference") for model in MODELS))
    for model, outcome in zip(MODELS, outcomes, strict=True):
        _assert_same(outcome, one_rank[model])


def test_packed_equals_one_sequence_at_a_time(
    checkpoints: dict[str, str], one_rank: dict[str, Outcome]
) -> None:
    outcomes = _run(*(Case(checkpoints[model], micro_batch_tokens=1) for model in MODELS))
    for model, outcome in zip(MODELS, outcomes, strict=True):
        assert outcome.num_micro_batches == 8
        _assert_same(outcome, one_rank[model])


@pytest.mark.parametrize(("model", "layout"), TWO_RANKS, ids=str)
def test_two_ranks_match_one(
    one_rank: dict[str, Outcome],
    two_ranks: dict[str, Outcome],
    model: str,
    layout: dict[str, Any],
) -> None:
    _assert_same(two_ranks[str((model, layout))], one_rank[model])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), FOUR_RANKS, ids=str)
def test_four_ranks_match_float64(
    checkpoints: dict[str, str], model: str, layout: dict[str, Any]
) -> None:
    (outcome,) = _run(Case(checkpoints[model], **layout))
    _assert_same(outcome, _oracle(checkpoints[model]))
