# SPDX-License-Identifier: Apache-2.0
"""Parameter counts of a rank: against the weight plan, Megatron's own modules, and publications."""

import multiprocessing
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from megatron.rl.model.architecture import parse_architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.planning.parameters import (
    active_parameters,
    rank_parameters,
    total_parameters,
)
from megatron.rl.weights.joins import whole
from megatron.rl.weights.plan import plan_weights
from tests.checkpoints import LLAMA, QWEN3, QWEN3_30B, QWEN3_MOE
from tests.real_models import QWEN3_4B, QWEN3_8B

RECIPE_30B = ParallelConfig(tensor=4, data=8, expert=8)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (QWEN3_MOE, ParallelConfig(tensor=2, pipeline=2, data=2, expert=2)),
        (QWEN3_MOE, ParallelConfig(tensor=2, data=2, expert=4)),
        (QWEN3 | {"tie_word_embeddings": True}, ParallelConfig(pipeline=2, context=2)),
        (QWEN3 | {"tie_word_embeddings": True}, ParallelConfig(tensor=4)),
        (LLAMA | {"num_hidden_layers": 5}, ParallelConfig(pipeline=2, last_stage_layers=2)),
        (QWEN3 | {"num_hidden_layers": 8}, ParallelConfig(pipeline=2, virtual=2)),
        (QWEN3_30B, RECIPE_30B),
    ],
    ids=["MoE PP", "MoE", "tied PP", "tied", "uneven", "virtual", "30B"],
)
def test_every_rank_holds_what_the_weight_plan_gives_it(
    config: dict[str, Any], layout: ParallelConfig
) -> None:
    model = parse_architecture(config)
    layout.check(model)
    plan = plan_weights(model, layout, "transformer_engine")
    for stage in range(layout.pipeline):
        counts = rank_parameters(model, layout, stage)
        for rank in {layout.stage_ranks(stage)[0], layout.stage_ranks(stage)[-1]}:
            held = [h.parameter for h in plan.held_by(rank)]
            experts = sum(whole(p.shape).numel for p in held if ".experts." in p.name)
            assert counts.expert == experts
            assert counts.total == sum(whole(p.shape).numel for p in held)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(QWEN3_4B, 4.0e9, 4.0e9), (QWEN3_8B, 8.2e9, 8.2e9), (QWEN3_30B, 30.5e9, 3.3e9)],
    ids=["4B", "8B", "30B-A3B"],
)
def test_published_sizes(config: dict[str, Any], total: float, active: float) -> None:
    """The model cards' numbers, which have one decimal; 3.35 B active is printed there as 3.3."""
    model = parse_architecture(config)
    assert total_parameters(model) == pytest.approx(total, rel=0.01)
    assert active_parameters(model) == pytest.approx(active, rel=0.02)


def test_active_parameters_by_hand() -> None:
    """Attention, router, 8 of 128 experts, two norms with q and k norms; embedding, head, norm."""
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    layer = attention + 128 * 2048 + 8 * 3 * 2048 * 768 + 2 * 2048 + 2 * 128
    expected = 48 * layer + 2 * 151936 * 2048 + 2048
    assert active_parameters(parse_architecture(QWEN3_30B)) == expected == 3_353_032_704


MegatronCase = tuple[dict[str, Any], dict[str, int], int]
MEGATRON_CASES: dict[str, MegatronCase] = {
    "4B, one rank": (QWEN3_4B, {}, 0),
    "4B, the recipe's": (QWEN3_4B, {"tensor": 2, "data": 4}, 7),
    "8B, one rank": (QWEN3_8B, {}, 0),
    "8B, the recipe's": (QWEN3_8B, {"tensor": 2, "data": 4}, 3),
    "30B, one rank": (QWEN3_30B, {}, 0),
    "30B, the recipe's": (QWEN3_30B, {"tensor": 4, "data": 8, "expert": 8}, 21),
    "30B, first of 4 stages": (QWEN3_30B, {"pipeline": 4, "data": 8, "expert": 8}, 0),
    "30B, last of 4 stages": (QWEN3_30B, {"pipeline": 4, "data": 8, "expert": 8}, 31),
}


def _count(config: dict[str, Any], layout_fields: dict[str, int], rank: int) -> tuple[int, int]:
    """Build a rank's part of Megatron's modules on the meta device; count all and experts'."""
    import torch.utils._device

    from megatron.rl import cpu_backend

    # The list of factories that torch.device("meta") acts on is made once; the CPU backend puts
    # others in their place.
    torch.utils._device._device_constructors()
    cpu_backend.install()
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.rl.model.build import BuildOptions, build_model

    # Megatron asks for this device by name wherever it allocates a parameter.
    torch.cuda.current_device = lambda: "meta"  # type: ignore[assignment,return-value]
    layout, model = ParallelConfig(**layout_fields), parse_architecture(config)
    # A group without peers: nothing is sent while a model is built.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    with torch.device("meta"):
        chunks = build_model(model, layout, BuildOptions(torch.bfloat16))
    named = [pair for chunk in chunks for pair in chunk.named_parameters()]
    assert {parameter.device.type for _, parameter in named} == {"meta"}
    plan_weights(model, layout, "local").check_against_model(chunks, rank)
    experts = sum(p.numel() for name, p in named if ".experts." in name)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return sum(p.numel() for _, p in named), experts


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: the fake group and the meta device stay there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.endswith("the recipe's") else [pytest.mark.slow])
        for name in MEGATRON_CASES
    ],
)
def test_counts_are_those_of_megatrons_modules(name: str, apart: ProcessPoolExecutor) -> None:
    config, layout_fields, rank = MEGATRON_CASES[name]
    layout, model = ParallelConfig(**layout_fields), parse_architecture(config)
    counts = rank_parameters(model, layout, stage=rank // layout.stage_size)
    megatron = apart.submit(_count, config, layout_fields, rank).result(timeout=300)
    assert (counts.total, counts.expert) == megatron
    if layout.world_size == 1:
        assert counts.total == total_parameters(model)
