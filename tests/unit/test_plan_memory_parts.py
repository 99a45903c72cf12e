# SPDX-License-Identifier: Apache-2.0
"""Memory by part and by phase, against numbers worked out by hand and against each other."""

from typing import Any

import pytest

from megatron.rl.config import Config, parse_config
from megatron.rl.model.architecture import parse_architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.planning.activations import micro_batches_in_flight
from megatron.rl.planning.engine_memory import GIB
from megatron.rl.planning.memory import MemoryPlan, plan_memory
from megatron.rl.planning.rates import GPUS, Assumptions, Cluster
from megatron.rl.planning.training_memory import TrainingBytes, Workload, training_bytes
from tests.checkpoints import QWEN3_30B
from tests.real_models import QWEN3_8B

NO_RESERVES = Assumptions(trainer_reserve_gib=0, engine_reserve_gib=0, sleeping_engine_gib=0)
TREE: dict[str, Any] = {
    "run": {"device": "cuda"},
    "model": {"path": "absent"},
    "task": {"name": "reasoning_gym/chain_sum"},
}


def _config(**sections: Any) -> Config:
    return parse_config(TREE | sections)


def _training(config: Config, model: dict[str, Any], stage: int = 0) -> TrainingBytes:
    return training_bytes(config, parse_architecture(model), stage, Workload.of(config), 1.0)


def test_weights_gradients_and_optimizer_by_hand() -> None:
    """8.19 B parameters over TP 2: 2, 4 and 12 bytes each, the last over 4 replicas."""
    config = _config(parallel={"tensor": 2, "data": 4})
    parts = _training(config, QWEN3_8B)
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    count = (36 * layer + 2 * 151936 * 4096) // 2 + norms
    assert 151936 % 256 == 128  # the vocabulary is padded by 128 rows, 64 a rank, twice
    count += 2 * 64 * 4096
    assert parts.weights == 2 * count
    assert parts.gradients == 4 * count
    assert parts.optimizer == 12 * count // 4
    assert parts.masters == 4 * count // 4


def test_experts_have_replicas_of_their_own() -> None:
    """TP 4 x DP 8 with EP 8: 8 replicas of attention, 32 / 8 = 4 of each expert."""
    config = _config(parallel={"tensor": 4, "data": 8, "expert": 8})
    parts = _training(config, QWEN3_30B)
    experts = 48 * 16 * 3 * 2048 * 768
    dense = parts.weights // 2 - experts
    assert parts.optimizer == 12 * dense // 8 + 12 * experts // 4


@pytest.mark.parametrize(
    ("megatron", "bytes_a_parameter"),
    [
        ({}, 12),
        ({"optimizer": {"use_precision_aware_optimizer": True}}, 12),
        (
            {
                "optimizer": {
                    "use_precision_aware_optimizer": True,
                    "exp_avg_dtype": "bf16",
                    "exp_avg_sq_dtype": "bf16",
                }
            },
            8,
        ),
        ({"optimizer": {"optimizer_cpu_offload": True}}, 12),
        ({"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}}, 0),
        ({"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}}, 6),
        ({"ddp": {"use_distributed_optimizer": False}}, 24),
    ],
)
def test_optimizer_settings(megatron: dict[str, Any], bytes_a_parameter: int) -> None:
    """Of 2 replicas each has half, unless the optimizer is not distributed."""
    config = _config(parallel={"data": 2}, megatron=megatron)
    parts = _training(config, QWEN3_8B)
    assert parts.optimizer == parts.weights // 2 * bytes_a_parameter // 2


def test_fp8_keeps_both_orientations_of_linear_layers() -> None:
    plain = _training(_config(), QWEN3_8B)
    config = _config(model=TREE["model"] | {"fp8": "blockwise"})
    copies = _training(config, QWEN3_8B)
    linear = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    assert (copies.weights, copies.fp8_weights) == (plain.weights, 2 * linear)
    assert copies.activations < plain.activations
    narrow = _training(
        _config(model=TREE["model"] | {"fp8": "blockwise", "fp8_params": True}), QWEN3_8B
    )
    assert (narrow.weights, narrow.fp8_weights) == (plain.weights - 2 * linear, 2 * linear)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelConfig(), [1]),
        (ParallelConfig(pipeline=4), [4, 3, 2, 1]),
        # Interleaved, 2 chunks: 2 (stages behind) + 4 + 1 chunks, halved.
        (ParallelConfig(pipeline=4, virtual=2), [5.5, 4.5, 3.5, 2.5]),
    ],
)
def test_micro_batches_in_flight(layout: ParallelConfig, expected: list[float]) -> None:
    stages = range(layout.pipeline)
    assert [micro_batches_in_flight(layout, stage, 16) for stage in stages] == expected
    assert max(micro_batches_in_flight(layout, stage, 2) for stage in stages) <= 2


def test_recomputation_keeps_less_and_works_harder() -> None:
    def activations(**transformer: Any) -> TrainingBytes:
        return _training(
            _config(parallel={"tensor": 2}, megatron={"transformer": transformer}), QWEN3_8B
        )

    none = activations()
    norms = activations(recompute_granularity="selective", recompute_modules=["layernorm"])
    mlp = activations(recompute_granularity="selective", recompute_modules=["mlp"])
    full = activations(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    tokens = Workload.of(_config(parallel={"tensor": 2})).tokens
    # Norms are fused with the products behind them, which Megatron does not compute again for them.
    assert norms.activations == none.activations
    # The second norm, 4096 numbers of 2 bytes a token on half of the tokens; and gate, up and their
    # product, of which a rank has half of the columns.
    assert none.activations - mlp.activations == 36 * tokens * (4096 + 3 * 12288)
    # The input of each layer, and the final norm's two tensors.
    assert full.activations == 38 * tokens * 4096
    assert full.working >= none.activations // 36 - tokens * 4096


def _memory(gib: float = 96.0, gpus: int = 8, **sections: Any) -> MemoryPlan:
    cluster = Cluster(gpus, 8, gib, GPUS["h20"], NO_RESERVES)
    return plan_memory(_config(**sections), parse_architecture(QWEN3_8B), cluster)


LAYOUT = {"tensor": 2, "data": 4}


def test_in_turn_the_trainer_gives_up_gradients_and_optimizer() -> None:
    plan = _memory(parallel=LAYOUT, rollout={"sleep": True, "kv_cache_gib": 10})
    assert plan.placement == "shared, in turn"
    phases = {phase.phase: phase.parts for phase in plan.phases}
    (trainer,) = plan.training
    assert plan.engine is not None
    assert phases["sample"] == {
        "weights": trainer.weights,
        "trainer's reserve": 0,
        "engine weights": plan.engine.weights,
        "engine sampler": plan.engine.sampler,
        "engine's reserve": 0,
        "KV cache": 10 * GIB,
    }
    assert sum(phases["train"].values()) == trainer.total
    # It starts while the trainer builds gradients and master weights.
    more = sum(phases["start"].values()) - sum(phases["sample"].values())
    assert more == trainer.gradients + trainer.masters
    assert plan.host_a_node == 8 * (trainer.optimizer + plan.engine.weights)


def test_at_once_everything_is_there() -> None:
    plan = _memory(parallel=LAYOUT, rollout={"kv_cache_gib": 10}, bridge={"transport": "cuda_ipc"})
    (phase,) = plan.phases
    (trainer,) = plan.training
    assert plan.placement == "shared, at once" and plan.engine is not None
    buckets = 2 * 256 * 2**20
    fixed = plan.engine.weights + plan.engine.sampler + 10 * GIB + buckets
    assert phase.total == trainer.total + fixed


def test_own_gpus_have_one_of_both() -> None:
    plan = _memory(
        gpus=4,
        parallel={"tensor": 2},
        rollout={"engines_per_node": 1},
        bridge={"transport": "nccl"},
    )
    assert plan.placement == "own GPUs"
    parts = {phase.phase: set(phase.parts) for phase in plan.phases}
    assert "engine weights" not in parts["train"] and "gradients" not in parts["sample"]


def test_an_engine_takes_its_share_though_the_trainer_needs_it() -> None:
    """vLLM's default is 0.92 of the GPU; beside a trainer that works at the same time, too much."""
    plan = _memory(parallel=LAYOUT, bridge={"transport": "cuda_ipc"})
    (phase,) = plan.phases
    (trainer,) = plan.training
    assert phase.total == pytest.approx(trainer.total + 0.92 * 96 * GIB + 2 * 256 * 2**20)
    (problem,) = plan.problems
    assert problem.startswith("train: ")


def test_the_kv_cache_gets_the_engines_share() -> None:
    asked = {"sleep": True, "engine_args": {"gpu_memory_utilization": 0.5}}
    plan = _memory(parallel=LAYOUT, rollout=asked)
    assert plan.engine is not None
    assert plan.kv_cache == 48 * GIB - plan.engine.weights - plan.engine.sampler
    assert plan.sequences == plan.kv_cache // (plan.engine.kv_a_token * 10240)
    small = _memory(gib=20.0, parallel=LAYOUT, rollout=asked)
    assert small.kv_cache < 0
    assert any("KV cache" in problem for problem in small.problems)


def test_problems_name_phase_and_largest_part() -> None:
    plan = _memory(parallel={"data": 8}, rollout={"sleep": True, "kv_cache_gib": 10})
    (problem,) = plan.problems
    assert problem.startswith("train: ") and "of 96.0 on a GPU, most of it activations" in problem


def test_micro_batches_never_hold_more_than_a_rank_has() -> None:
    """16 prompts x 2 responses of at most 99 tokens on 4 replicas: 8 sequences each."""
    rollout = {"group_size": 2, "max_prompt_tokens": 50, "max_response_tokens": 50}
    config = _config(parallel={"data": 4}, rollout=rollout)
    assert Workload.of(config) == Workload(792, 792, 1, 792)
    halved = _config(parallel={"data": 4}, rollout=rollout, train={"micro_batch_tokens": 400})
    assert Workload.of(halved) == Workload(400, 400, 2, 792)
