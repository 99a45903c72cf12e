# SPDX-License-Identifier: Apache-2.0
"""The same packed batch in every small layout against one rank, and one rank against float64.

Gathered weights are those of the checkpoint, bit for bit.
All go through Megatron's own schedule, DistributedDataParallel and finalize_model_grads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from pdm import SequenceMaskConfig
from tests.checkpoints import LLAMA, QWEN3, QWEN3_MOE, write_checkpoint
from tests.parallel.policy_case import LOSS, Case, Outcome, float64_oracle, run_cases
from tests.parallel.spawn import run_ranks

# Of the gradient's norm, per parameter: float32 rounding through two layers is about 4e-6.
GRADIENT_TOLERANCE = 1e-5
LOG_PROB_TOLERANCE = 1e-5
# The same sums in another order.
ORDER_TOLERANCE = 1e-6

TIMEOUT_S = 400.0

MODELS = ("dense", "moe", "tied")
SEQUENCE_LOSS = dataclasses.replace(
    LOSS,
    sequence_mask=SequenceMaskConfig(
        criterion="combined", divergence="topk_kl", max_threshold=6.0, average_threshold=1.3
    ),
)
# Three micro-batches, and for virtual stages an empty one: enough to pass the schedule's warm-up.
SMALL: dict[str, Any] = {"micro_batch_tokens": 22}
VIRTUAL: dict[str, Any] = {"pipeline": 2, "virtual": 2} | SMALL
ONE_RANK: list[tuple[str, dict[str, Any]]] = [
    *((model, {"head": "reference"}) for model in MODELS),
    *((model, {"micro_batch_tokens": 1}) for model in MODELS),
    ("dense", SMALL),
    ("dense", {"loss": SEQUENCE_LOSS}),
    ("dense", {"shuffle": 1}),
    ("moe", {"shuffle": 1}),
]
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
    ("moe", {"tensor": 2, "expert": 2, "recompute": True}),
    ("moe", {"tensor": 2, "expert": 2, "head": "reference"}),
    ("tied", {"tensor": 2}),
    ("dense", {"context": 2}),
    ("moe", {"context": 2, "expert": 2}),
    ("dense4", VIRTUAL),
    ("moe3", {"pipeline": 2, "last_stage_layers": 1}),
    ("llama", {"tensor": 2}),
    # Fewer key-value heads than ranks: Megatron cuts inside a group of q, k and v.
    ("one_group", {"tensor": 2}),
]
SEQUENCE_MASK = ("dense", {"context": 2, "loss": SEQUENCE_LOSS})
FOUR_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"tensor": 2, "pipeline": 2}),
    ("dense", {"tensor": 2, "data": 2}),
    ("tied", {"tensor": 2, "pipeline": 2}),
    ("moe", {"tensor": 2, "pipeline": 2, "expert": 2}),
    ("moe", {"tensor": 2, "data": 2, "expert": 4}),
    ("moe", {"context": 4, "expert": 4}),
    ("moe", {"tensor": 2, "context": 2, "expert": 4}),
    ("tied", {"pipeline": 2, "context": 2}),
    ("dense", {"data": 2, "context": 2}),
    ("moe4", VIRTUAL | {"context": 2, "expert": 2}),
    ("tied4", VIRTUAL | {"tensor": 2}),
    ("dense8", VIRTUAL | {"pipeline": 4}),
    ("dense", {"tensor": 4}),
    ("llama", {"tensor": 4}),
    ("moe", {"tensor": 4, "expert": 4}),
]
EIGHT_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("moe", {"tensor": 2, "pipeline": 2, "context": 2, "expert": 4}),
    ("moe", {"tensor": 2, "pipeline": 2, "data": 2, "expert": 2}),
    ("moe4", VIRTUAL | {"tensor": 2, "data": 2, "expert": 2}),
]
BASES = {
    "dense": QWEN3,
    "moe": QWEN3_MOE,
    "tied": QWEN3 | {"tie_word_embeddings": True},
    "llama": LLAMA,
    "one_group": QWEN3 | {"num_key_value_heads": 1},
}
# A number behind the name is the model's number of layers.
CONFIGS = BASES | {
    f"{name}{layers}": BASES[name] | {"num_hidden_layers": layers}
    for name, layers in (("dense", 4), ("dense", 8), ("moe", 3), ("moe", 4), ("tied", 4))
}


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
        outcomes = run_ranks(run_cases, world_size, new, timeout_s=TIMEOUT_S)[0]
        _outcomes.update(zip(new, outcomes, strict=True))
    return [_outcomes[case] for case in cases]


@functools.cache
def _oracle(path: str) -> Outcome:
    return float64_oracle(path, Case(path).loss)


def _assert_same(
    outcome: Outcome, expected: Outcome, *, gradient_tolerance: float = GRADIENT_TOLERANCE
) -> None:
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
        assert error <= gradient_tolerance, f"{name}: {error:.2e}"


@pytest.fixture(scope="module")
def one_rank(checkpoints: dict[str, str]) -> dict[str, Outcome]:
    """One rank without further settings; those with some run in the same start."""
    plain = [Case(checkpoints[model]) for model in MODELS]
    _run(*plain, *(Case(checkpoints[model], **more) for model, more in ONE_RANK))
    return dict(zip(MODELS, _run(*plain), strict=True))


def _run_all(
    checkpoints: dict[str, str], layouts: list[tuple[str, dict[str, Any]]]
) -> dict[str, Outcome]:
    """Every layout of one number of ranks, in one start of the processes."""
    cases = [Case(checkpoints[model], **layout) for model, layout in layouts]
    return dict(zip(map(str, layouts), _run(*cases), strict=True))


@pytest.fixture(scope="module")
def two_ranks(checkpoints: dict[str, str]) -> dict[str, Outcome]:
    return _run_all(checkpoints, [*TWO_RANKS, SEQUENCE_MASK])


@pytest.fixture(scope="module")
def four_ranks(checkpoints: dict[str, str]) -> dict[str, Outcome]:
    return _run_all(checkpoints, FOUR_RANKS)


@pytest.fixture(scope="module")
def eight_ranks(checkpoints: dict[str, str]) -> dict[str, Outcome]:
    return _run_all(checkpoints, EIGHT_RANKS)


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
    checkpoints: dict[str, str],
    one_rank: dict[str, Outcome],
    two_ranks: dict[str, Outcome],
    model: str,
    layout: dict[str, Any],
) -> None:
    expected = one_rank[model] if model in one_rank else _oracle(checkpoints[model])
    _assert_same(two_ranks[str((model, layout))], expected)


def test_virtual_stages_fill_up_with_empty_micro_batches(
    checkpoints: dict[str, str], one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome]
) -> None:
    (plain,) = _run(Case(checkpoints["dense"], **SMALL))
    assert plain.num_micro_batches == 3
    assert two_ranks[str(("dense4", VIRTUAL))].num_micro_batches == 4


def test_a_sequence_mask_sees_whole_sequences_under_context_parallelism(
    checkpoints: dict[str, str], one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome]
) -> None:
    (expected,) = _run(Case(checkpoints["dense"], loss=SEQUENCE_LOSS))
    head = "lm_head.weight"
    assert not torch.allclose(expected.gradients[head], one_rank["dense"].gradients[head])
    assert expected.gradients[head].norm() > 0, "some sequences must be accepted"
    _assert_same(two_ranks[str(SEQUENCE_MASK)], expected)


def test_the_order_of_samples_changes_nothing_beyond_rounding(
    checkpoints: dict[str, str], one_rank: dict[str, Outcome]
) -> None:
    for model in ("dense", "moe"):
        (outcome,) = _run(Case(checkpoints[model], shuffle=1))
        _assert_same(outcome, one_rank[model], gradient_tolerance=ORDER_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), FOUR_RANKS, ids=str)
def test_four_ranks_match_float64(
    checkpoints: dict[str, str],
    four_ranks: dict[str, Outcome],
    model: str,
    layout: dict[str, Any],
) -> None:
    _assert_same(four_ranks[str((model, layout))], _oracle(checkpoints[model]))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), EIGHT_RANKS, ids=str)
def test_eight_ranks_match_float64(
    checkpoints: dict[str, str],
    eight_ranks: dict[str, Outcome],
    model: str,
    layout: dict[str, Any],
) -> None:
    _assert_same(eight_ranks[str((model, layout))], _oracle(checkpoints[model]))
