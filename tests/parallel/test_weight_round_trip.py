# SPDX-License-Identifier: Apache-2.0
"""Hugging Face -> Megatron -> Hugging Face, bit for bit, in every layout; Megatron's rank order.

That the parameters in between mean what Megatron takes them for is shown by the log-probs and
gradients of ``test_policy_layouts.py`` against transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.rl.model.architecture import read_architecture
from megatron.rl.parallel import ParallelConfig
from tests.checkpoints import LLAMA, QWEN3, QWEN3_MOE, write_checkpoint
from tests.parallel.spawn import run_ranks

TIED = {"tie_word_embeddings": True}
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3_tied": QWEN3 | TIED,
    "moe": QWEN3_MOE,
    "moe_tied": QWEN3_MOE | TIED,
    "llama": LLAMA,
    "llama_tied": LLAMA | TIED,
    "one_group": QWEN3 | {"num_key_value_heads": 1},
    "moe_6_layers": QWEN3_MOE | {"num_hidden_layers": 6} | TIED,
}
# Small enough that every tensor but the smallest has a bucket of its own.
BUCKET_BYTES = 4096

Layout = dict[str, Any]
TWO_RANKS: list[tuple[str, Layout]] = [
    ("moe_tied", {"pipeline": 2}),
    ("moe", {"tensor": 2, "expert": 2}),
    ("moe", {"data": 2, "expert": 2}),
    ("llama_tied", {"tensor": 2}),
    ("one_group", {"tensor": 2}),
    ("moe_6_layers", {"pipeline": 2, "virtual": 3}),
]


def _full_matrix() -> dict[int, list[tuple[str, Layout]]]:
    """By number of ranks. 4 heads and 2 key-value heads: TP 4 has fewer of these than ranks."""
    cases: dict[int, list[tuple[str, Layout]]] = {}
    for model, config in CONFIGS.items():
        for tensor in (1, 2, 4):
            for pipeline in (1, 2):
                for expert in (1, 2) if "moe" in model else (1,):
                    data = 2 if expert == 2 and tensor == 1 else 1
                    layout = {"tensor": tensor, "pipeline": pipeline, "data": data}
                    cases.setdefault(tensor * pipeline * data, []).append(
                        (model, layout | {"expert": expert})
                    )
        assert config["num_hidden_layers"] % 2 == 0
    cases[8] += [
        ("moe_tied", {"tensor": 2, "context": 2, "data": 2, "expert": 4}),
        ("moe_6_layers", {"pipeline": 2, "context": 2, "data": 2, "expert": 4, "virtual": 3}),
        ("moe_6_layers", {"pipeline": 4, "data": 2, "first_stage_layers": 1,
                          "last_stage_layers": 1, "expert": 2}),
    ]  # fmt: skip
    return cases


@dataclass(frozen=True)
class Tensors:
    """What a rank got: tensors by name, in order, and whether each lies where it was told to."""

    tensors: dict[str, torch.Tensor]
    in_place: bool


@dataclass(frozen=True)
class Gathered:
    """By destinations; empty on ranks that are not among them."""

    alone: Tensors
    both: Tensors
    as_bfloat16: Tensors


def gather_cases(rank: int, world_size: int, cases: list[tuple[str, Layout]]) -> list[Gathered]:
    from megatron.rl import cpu_backend

    cpu_backend.install()
    return [_gather_case(rank, world_size, path, layout) for path, layout in cases]


def _gather_case(rank: int, world_size: int, path: str, settings: Layout) -> Gathered:
    from megatron.core import parallel_state

    from megatron.rl.model.build import BuildOptions, build_model, parameter_naming
    from megatron.rl.parallel import build_groups
    from megatron.rl.weights.load import load_hf_checkpoint
    from megatron.rl.weights.plan import plan_weights

    layout, architecture = ParallelConfig(**settings), read_architecture(path)
    layout.check(architecture)
    build_groups(layout, seed=1)
    _check_rank_order(layout)
    chunks = build_model(architecture, layout, BuildOptions())
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.nn.init.constant_(parameter, torch.nan)  # what is not loaded shows
    plan = plan_weights(architecture, layout, parameter_naming())
    load_hf_checkpoint(chunks, plan, path, rank=rank)
    for chunk in chunks:
        assert all(parameter.isfinite().all() for parameter in chunk.parameters())
    both = tuple({0, world_size - 1})
    gathered = Gathered(
        _gather(chunks, plan, (0,), None, None),
        _gather(chunks, plan, both, max(1, world_size // 2), None),
        _gather(chunks, plan, both, None, torch.bfloat16),
    )
    parallel_state.destroy_model_parallel()
    return gathered


def _gather(chunks, plan, destinations, ranks_per_node, dtype) -> Tensors:  # type: ignore[no-untyped-def]
    from megatron.rl.weights.gather import gather_hf_tensors

    places: dict[str, torch.Tensor] = {}

    def allocate(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        if dtype is None:
            return None
        places[name] = torch.full(shape, torch.nan, dtype=dtype)
        return places[name]

    tensors: dict[str, torch.Tensor] = {}
    in_place = True
    for name, tensor in gather_hf_tensors(
        chunks,
        plan,
        destinations=destinations,
        ranks_per_node=ranks_per_node,
        allocate=allocate,
        bucket_bytes=BUCKET_BYTES,
    ):
        assert name not in tensors
        in_place &= dtype is None or tensor is places[name]
        tensors[name] = tensor.clone()
    return Tensors(tensors, in_place)


def _check_rank_order(layout: ParallelConfig) -> None:
    """The plan's ranks are those of Megatron's groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    stage = ps.get_pipeline_model_parallel_rank()
    replicas = ps.get_data_parallel_group(with_context_parallel=True)
    tensor_ranks = layout.tensor_ranks(stage, ps.get_tensor_model_parallel_rank())
    assert dist.get_process_group_ranks(replicas) == list(tensor_ranks)
    expert_replicas = ps.get_expert_data_parallel_group()
    expert_ranks = layout.expert_ranks(stage, ps.get_expert_model_parallel_rank())
    assert dist.get_process_group_ranks(expert_replicas) == list(expert_ranks)
    assert dist.get_rank() in layout.stage_ranks(stage)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: str(write_checkpoint(root / name, config)) for name, config in CONFIGS.items()}


def _assert_round_trips(
    checkpoints: dict[str, str],
    cases: list[tuple[str, Layout]],
    results: list[list[Gathered]],
) -> None:
    for number, (model, layout) in enumerate(cases):
        original = load_file(Path(checkpoints[model]) / "model.safetensors")
        assert original
        for rank, of_rank in enumerate(results):
            gathered = of_rank[number]
            what = f"{model} {layout} on rank {rank}"
            _assert_same(gathered.alone, original if rank == 0 else {}, what)
            at_ends = rank in (0, len(results) - 1)
            _assert_same(gathered.both, original if at_ends else {}, what)
            cast = {name: tensor.bfloat16() for name, tensor in original.items()}
            _assert_same(gathered.as_bfloat16, cast if at_ends else {}, what)


def _assert_same(found: Tensors, expected: dict[str, torch.Tensor], what: str) -> None:
    assert found.in_place
    assert found.tensors.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert torch.equal(found.tensors[name], tensor), f"{name} of {what}"


FULL = _full_matrix()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", FULL)
def test_every_round_trip_is_exact(checkpoints: dict[str, str], world_size: int) -> None:
    where = [(checkpoints[model], layout) for model, layout in FULL[world_size]]
    results = run_ranks(gather_cases, world_size, where, timeout_s=600.0)
    _assert_round_trips(checkpoints, FULL[world_size], results)


def two_ranks(
    rank: int, world_size: int, cases: list[tuple[str, Layout]], path: str
) -> tuple[list[Gathered], list[str]]:
    return gather_cases(rank, world_size, cases), refusals_of_a_broken_model(rank, path)


def refusals_of_a_broken_model(rank: int, path: str) -> list[str]:
    """Return this rank's errors: rank 1's model has another type, then it lacks a parameter."""
    from megatron.rl.model.build import BuildOptions, build_model
    from megatron.rl.parallel import build_groups
    from megatron.rl.weights.gather import gather_hf_tensors
    from megatron.rl.weights.plan import WeightPlanError, plan_weights

    layout, architecture = ParallelConfig(pipeline=2), read_architecture(path)
    build_groups(layout, seed=1)
    (chunk,) = build_model(architecture, layout, BuildOptions())
    plan = plan_weights(architecture, layout, "local")
    errors = []

    def gather() -> None:
        with pytest.raises(WeightPlanError) as caught:
            next(gather_hf_tensors([chunk], plan), None)
        errors.append(str(caught.value))

    if rank == 1:
        chunk.bfloat16()
    gather()
    if rank == 1:
        del chunk.decoder.layers[0].mlp.linear_fc2.weight
    gather()
    return errors


@pytest.fixture(scope="module")
def two_rank_results(checkpoints: dict[str, str]) -> list[tuple[list[Gathered], list[str]]]:
    where = [(checkpoints[model], layout) for model, layout in TWO_RANKS]
    return run_ranks(two_ranks, 2, where, checkpoints["qwen3"])


def test_round_trip_is_exact(
    checkpoints: dict[str, str], two_rank_results: list[tuple[list[Gathered], list[str]]]
) -> None:
    _assert_round_trips(checkpoints, TWO_RANKS, [gathered for gathered, _ in two_rank_results])


def test_every_rank_refuses_when_one_has_another_model(
    two_rank_results: list[tuple[list[Gathered], list[str]]],
) -> None:
    for _, (another_type, another_model) in two_rank_results:
        assert "['torch.bfloat16', 'torch.float32']" in another_type
        assert "rank 1" in another_model and "layers.0.mlp.linear_fc2.weight" in another_model
