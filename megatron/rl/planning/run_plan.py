# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: memory, traffic and time together, and what does not fit."""

import dataclasses
from dataclasses import dataclass

from megatron.rl.config import Config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.planning.engine_memory import EngineShape
from megatron.rl.planning.memory import MemoryPlan, plan_memory, ranks_per_node
from megatron.rl.planning.phase_times import PhaseTime, num_engines, plan_times
from megatron.rl.planning.rates import Cluster
from megatron.rl.planning.traffic import Traffic, plan_traffic
from megatron.rl.rollout.topology import NodeDevices, plan_topology


@dataclass(frozen=True)
class RunPlan:
    """What a config would need on a cluster.

    Attributes:
        response_tokens: the mean length that traffic and times are for.
        engines: of the whole run.
        memory, traffic: see there.
        times: of one rollout batch; empty on CPU, for which there are no rates.
        problems: why it does not fit; empty where it does.
    """

    config: Config
    model: Architecture
    cluster: Cluster
    response_tokens: int
    engines: int
    memory: MemoryPlan
    traffic: Traffic
    times: tuple[PhaseTime, ...]
    problems: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.times)


def make_plan(
    config: Config, model: Architecture, cluster: Cluster, response_tokens: int
) -> RunPlan:
    """Plan a run.

    Raises:
        UserError: model, layout and engine contradict each other, whatever the memory.
    """
    config.parallel.check(model)
    if model.max_positions < config.rollout.max_prompt_tokens + config.rollout.max_response_tokens:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens exceed the model's "
            f"{model.max_positions} positions"
        )
    memory = plan_memory(config, model, cluster)
    traffic = plan_traffic(config, model, response_tokens, cluster.assumptions.prompt_tokens)
    problems = [] if config.run.device == "cpu" else _too_few_gpus(config, cluster, memory)
    if not problems and memory.placement in ("shared, in turn", "shared, at once", "own GPUs"):
        _check_placement(config, cluster, memory)
    times = () if config.run.device == "cpu" else plan_times(
        config, model, cluster, traffic, memory
    )  # fmt: skip
    return RunPlan(
        config=config,
        model=model,
        cluster=cluster,
        response_tokens=response_tokens,
        engines=0 if memory.engine is None else num_engines(config, cluster),
        memory=memory,
        traffic=traffic,
        times=times,
        problems=(*problems, *memory.problems),
    )


def gpus_needed(config: Config, memory: MemoryPlan, cluster: Cluster) -> int:
    """Return how many GPUs trainer and engines take together."""
    engines = 0
    if memory.placement == "own GPUs":
        engines = num_engines(config, cluster) * EngineShape.of(config).gpus
    return config.parallel.world_size + engines


def _too_few_gpus(config: Config, cluster: Cluster, memory: MemoryPlan) -> list[str]:
    needed, layout = gpus_needed(config, memory, cluster), config.parallel
    if needed <= cluster.gpus:
        return []
    return [
        f"{needed} GPUs are needed, {cluster.gpus} are there: parallel.tensor x pipeline x context "
        f"x data is {layout.tensor} x {layout.pipeline} x {layout.context} x {layout.data}"
        + (f", and engines take {needed - layout.world_size}" if needed > layout.world_size else "")
    ]


def _check_placement(config: Config, cluster: Cluster, memory: MemoryPlan) -> None:
    names = [str(i) for i in range(min(cluster.gpus, cluster.gpus_per_node))]
    plan_topology(
        config.parallel,
        ranks_per_node=ranks_per_node(config, cluster),
        engines_per_node=config.rollout.engines_per_node,
        seed=config.run.seed,
        devices=NodeDevices(
            names,
            EngineShape.of(config).gpus,
            "own" if memory.placement == "own GPUs" else "shared",
        ),
    ).split(config.rollout.prompts, "rollout.prompts")


def settled_device(config: Config) -> Config:
    """Take ``run.device: auto`` for a GPU: the machine that plans need not be the one that runs."""
    if config.run.device != "auto":
        return config
    return dataclasses.replace(config, run=dataclasses.replace(config.run, device="cuda"))
