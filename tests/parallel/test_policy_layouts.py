# SPDX-License-Identifier: Apache-2.0
"""The same packed batch in every small layout against one rank, and one rank against float64.

All go through Megatron's own schedule, DistributedDataParallel and finalize_model_grads.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import QWEN3, QWEN3_MOE, write_checkpoint
from tests.parallel.policy_case import Case, Outcome, float64_oracle, run_case
from tests.parallel.spawn import run_ranks

# Of the gradient's norm, per parameter: float32 rounding through two layers is about 4e-6.
GRADIENT_TOLERANCE = 1e-5
LOG_PROB_TOLERANCE = 1e-5

DENSE_LAYOUTS = [
    {"tensor": 2},
    {"tensor": 2, "sequence": False},
    {"pipeline": 2},
    {"data": 2},
]
MOE_LAYOUTS = [
    {"data": 2, "expert": 2},
    {"tensor": 2, "expert": 2},
]
SLOW_LAYOUTS = [
    ("dense", {"tensor": 2, "pipeline": 2}),
    ("dense", {"tensor": 2, "data": 2}),
    ("dense", {"pipeline": 2, "data": 2}),
    ("tied", {"pipeline": 2}),
    ("tied", {"tensor": 2}),
    ("moe", {"pipeline": 2}),
    ("moe", {"data": 2}),
    ("moe", {"tensor": 2, "pipeline": 2, "expert": 2}),
    ("moe", {"tensor": 2, "data": 2, "expert": 4}),
]
CONFIGS = {"dense": QWEN3, "moe": QWEN3_MOE, "tied": QWEN3 | {"tie_word_embeddings": True}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, config) for name, config in CONFIGS.items()}


@functools.cache
def _oracle(path: str) -> Outcome:
    return float64_oracle(path, Case(path).loss)


@functools.cache
def _run(case: Case) -> Outcome:
    return run_ranks(run_case, case.tensor * case.pipeline * case.data, case)[0]


def _assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert torch.equal(outcome.keep, expected.keep)
    assert 0 < int(expected.keep.sum()) < expected.keep.numel(), "the mask must do something"
    difference = (outcome.log_probs - expected.log_probs).abs().max()
    assert difference <= LOG_PROB_TOLERANCE
    assert outcome.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = (outcome.gradients[name].double() - gradient.double()).norm() / gradient.norm()
        assert error <= GRADIENT_TOLERANCE, f"{name}: {error:.2e}"


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_one_rank_matches_a_plain_float64_model(checkpoints: dict[str, Path], model: str) -> None:
    path = str(checkpoints[model])
    _assert_same(_run(Case(path)), _oracle(path))


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_packed_equals_one_sequence_at_a_time(checkpoints: dict[str, Path], model: str) -> None:
    one_each = Case(str(checkpoints[model]), micro_batch_tokens=1)
    outcome = _run(one_each)
    assert outcome.num_micro_batches == 8
    _assert_same(outcome, _run(replace(one_each, micro_batch_tokens=1000)))


@pytest.mark.parametrize("layout", DENSE_LAYOUTS, ids=str)
def test_dense_layouts_match_one_rank(checkpoints: dict[str, Path], layout: dict[str, int]) -> None:
    path = str(checkpoints["dense"])
    _assert_same(_run(Case(path, **layout)), _run(Case(path)))


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
def test_moe_layouts_match_one_rank(checkpoints: dict[str, Path], layout: dict[str, int]) -> None:
    path = str(checkpoints["moe"])
    _assert_same(_run(Case(path, **layout)), _run(Case(path)))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), SLOW_LAYOUTS, ids=str)
def test_larger_layouts_match_float64(
    checkpoints: dict[str, Path], model: str, layout: dict[str, int]
) -> None:
    path = str(checkpoints[model])
    _assert_same(_run(Case(path, **layout)), _oracle(path))
