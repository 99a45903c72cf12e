# SPDX-License-Identifier: Apache-2.0
"""What is in a GPU's memory in each phase of a run, and whether it fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.rl.config import Config
from megatron.rl.model.architecture import Architecture
from megatron.rl.planning.engine_memory import (
    CPU_KV_CACHE_GIB,
    DEFAULT_UTILIZATION,
    GIB,
    EngineBytes,
    EngineShape,
    engine_memory,
)
from megatron.rl.planning.rates import Cluster
from megatron.rl.planning.training_memory import TrainingBytes, Workload, training_bytes

MIB = 1 << 20
# A bucket is packed while the one before is loaded.
_BUCKETS = 2

Placement = Literal["shared, in turn", "shared, at once", "own GPUs", "own process", "elsewhere"]


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes in one GPU's memory in one phase, part by part."""

    phase: str
    parts: Mapping[str, int]
    limit: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the ranks that need most.

    Attributes:
        placement: where the engine's GPUs are, relative to the trainer's.
        training: of each pipeline stage.
        engine: None where rollouts are replayed or a server makes them.
        kv_cache: bytes of KV cache a GPU that the engine gets; negative where its weights alone
            exceed its share.
        longest: tokens of the longest sequence.
        phases: in the order of a run.
        host_a_node: bytes that offloading puts into the memory of each node.
    """

    placement: Placement
    training: tuple[TrainingBytes, ...]
    engine: EngineBytes | None
    kv_cache: int
    longest: int
    phases: tuple[PhaseMemory, ...]
    host_a_node: int

    @property
    def worst(self) -> PhaseMemory:
        """The phase with the least left over."""
        return min(self.phases, key=lambda phase: phase.limit - phase.total)

    @property
    def sequences(self) -> int:
        """Sequences of the greatest length whose KV cache fits at once."""
        if self.engine is None:
            return 0
        return max(0, self.kv_cache) // (self.engine.kv_a_token * self.longest)

    @property
    def problems(self) -> list[str]:
        """What does not fit, the first phase first; empty where all does."""
        found = [
            f"{phase.phase}: {phase.total / GIB:.1f} GiB of {phase.limit / GIB:.1f} on a GPU, most "
            f"of it {phase.largest} ({phase.parts[phase.largest] / GIB:.1f})"
            for phase in self.phases
            if not phase.fits
        ]
        if self.engine is not None and self.sequences == 0:
            found.append(
                f"sample: the engine's share leaves {self.kv_cache / GIB:.1f} GiB of KV cache, and "
                f"one sequence of {self.longest} tokens takes "
                f"{self.engine.kv_a_token * self.longest / GIB:.1f} GiB"
            )
        return found


def placement_of(config: Config, cluster: Cluster) -> Placement:
    """Return where the engines are; the rule is that of ``rollout.from_config``."""
    rollout = config.rollout
    if rollout.engine != "vllm":
        return "elsewhere"
    if config.run.device == "cpu":
        return "own process"
    if rollout.sleep:
        return "shared, in turn"
    if config.bridge.transport == "cuda_ipc":
        return "shared, at once"
    ranks = ranks_per_node(config, cluster)
    needed = rollout.engines_per_node * EngineShape.of(config).gpus
    beside = ranks + needed <= cluster.gpus_per_node
    return "own GPUs" if beside or config.bridge.transport == "nccl" else "shared, at once"


def ranks_per_node(config: Config, cluster: Cluster) -> int:
    """Return how many trainer ranks a node has: one node takes all it can, several have as many."""
    world = config.parallel.world_size
    if world <= cluster.gpus_per_node:
        return world
    return -(-world // -(-cluster.gpus // cluster.gpus_per_node))


def plan_memory(config: Config, model: Architecture, cluster: Cluster) -> MemoryPlan:
    """Predict every phase's memory."""
    workload = Workload.of(config)
    assumptions = cluster.assumptions
    stages = tuple(
        training_bytes(config, model, stage, workload, assumptions.expert_imbalance)
        for stage in range(config.parallel.pipeline)
    )
    trainer = max(stages, key=lambda stage: stage.total)
    heaviest = max(stages, key=lambda stage: stage.weights)
    placement = placement_of(config, cluster)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    limit = int(cluster.memory_gib * GIB)
    on_gpu = config.run.device != "cpu"
    reserve = int(assumptions.trainer_reserve_gib * GIB) if on_gpu else 0
    train = _trainer_parts(trainer) | {"trainer's reserve": reserve}
    kept = {"weights": heaviest.weights, "trainer's reserve": reserve}
    buckets = {"bridge buckets": _BUCKETS * config.bridge.bucket_mib * MIB}
    if placement == "elsewhere":
        phases = [PhaseMemory("train", train, limit), PhaseMemory("sync", kept | buckets, limit)]
        return MemoryPlan(placement, stages, None, 0, longest, tuple(phases), 0)
    engine = engine_memory(config, model)
    fixed = _engine_parts(config, engine, cluster)
    kv_cache = _kv_cache(config, limit, sum(fixed.values()))
    sampling = fixed | {"KV cache": max(0, kv_cache)}
    host = 0
    if placement == "shared, in turn":
        asleep = {"sleeping engine": int(assumptions.sleeping_engine_gib * GIB)}
        # The engine loads while the trainer builds its model, and neither waits for the other.
        built = {"gradients": heaviest.gradients, "master weights": heaviest.masters}
        phases = [
            PhaseMemory("start", kept | built | sampling, limit),
            PhaseMemory("sample", kept | sampling, limit),
            PhaseMemory("train", train | asleep, limit),
            PhaseMemory("sync", kept | sampling | buckets, limit),
        ]
        host = ranks_per_node(config, cluster) * (trainer.optimizer + engine.weights)
    elif placement == "shared, at once":
        phases = [PhaseMemory("train", train | sampling | buckets, limit)]
    else:
        phases = [
            PhaseMemory("sample", sampling | buckets, limit),
            PhaseMemory("train", train | buckets, limit),
        ]
    return MemoryPlan(placement, stages, engine, kv_cache, longest, tuple(phases), host)


def _trainer_parts(trainer: TrainingBytes) -> dict[str, int]:
    parts = {
        "weights": trainer.weights,
        "FP8 weight copies": trainer.fp8_weights,
        "gradients": trainer.gradients,
        "optimizer": trainer.optimizer,
        "activations": trainer.activations,
        "head": trainer.head,
        "working set": trainer.working,
        "batch": trainer.batch,
    }
    return {name: size for name, size in parts.items() if size}


def _engine_parts(config: Config, engine: EngineBytes, cluster: Cluster) -> dict[str, int]:
    parts = {"engine weights": engine.weights, "engine sampler": engine.sampler}
    if config.run.device != "cpu":
        parts["engine's reserve"] = int(cluster.assumptions.engine_reserve_gib * GIB)
    return parts


def _kv_cache(config: Config, limit: int, fixed: int) -> int:
    """KV cache that the engine takes: what is asked for, or what its share of the GPU leaves.

    Whatever else is on the GPU: where that much is not free, vLLM does not start
    (``vllm.v1.worker.utils.request_memory``). Negative where the engine's weights alone exceed it.
    """
    rollout = config.rollout
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * GIB)
    if config.run.device == "cpu":
        return int(CPU_KV_CACHE_GIB * GIB)
    share = float(rollout.engine_args.get("gpu_memory_utilization", DEFAULT_UTILIZATION))
    return int(share * limit) - fixed
