# SPDX-License-Identifier: Apache-2.0
"""Another layout for a run that does not fit: of those that do, and that are about as fast as the
fastest by their plans, the one with the fewest changes.

Tried: every split of the GPUs over tensor, pipeline, context, expert and data parallelism that
:meth:`ParallelConfig.check` accepts, with several amounts of recomputation and two sizes of
micro-batches; and, where the engine is what does not fit, its size and its share of the GPU.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.rl.config import Config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.planning.engine_memory import EngineShape
from megatron.rl.planning.memory import plan_memory, ranks_per_node
from megatron.rl.planning.rates import Cluster
from megatron.rl.planning.run_plan import RunPlan, make_plan

_PIPELINES = (1, 2, 4, 8)
_CONTEXTS = (1, 2, 4)
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
# Times are predicted no better than this.
_ABOUT_AS_FAST = 1.15
_FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_RECOMPUTE_FIELDS = (*_FULL, "recompute_modules")


@dataclass(frozen=True)
class Suggestion:
    """A plan that fits, and the settings that lead to it from the config that was given."""

    plan: RunPlan
    changes: dict[str, Any]

    @property
    def arguments(self) -> str:
        """The changes as arguments of the command line."""
        return " ".join(f"--set '{key}={_yaml(value)}'" for key, value in self.changes.items())


def suggest_layout(
    config: Config, model: Architecture, cluster: Cluster, response_tokens: int
) -> Suggestion | None:
    """Return the layout to take instead, or None where none fits."""
    found = []
    for candidate in _candidates(config, model, cluster):
        try:
            plan = make_plan(candidate, model, cluster, response_tokens)
        except UserError:
            continue
        if not plan.problems:
            found.append(Suggestion(plan, _changes(config, candidate)))
    if not found:
        return None
    fastest = min(suggestion.plan.seconds for suggestion in found)
    near = [one for one in found if one.plan.seconds <= _ABOUT_AS_FAST * fastest]
    return min(near, key=lambda one: (len(one.changes), one.plan.seconds))


def _candidates(config: Config, model: Architecture, cluster: Cluster) -> Iterator[Config]:
    """Yield configs whose trainer fits, and their engines' variants."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    sizes = sorted({config.train.micro_batch_tokens, longest}, reverse=True)
    world = min(config.parallel.world_size, cluster.gpus)
    for layout in _layouts(world, model, cluster):
        for transformer in _recomputations(config, model):
            for tokens in sizes:
                changed = dataclasses.replace(
                    config,
                    parallel=layout,
                    train=dataclasses.replace(config.train, micro_batch_tokens=tokens),
                    megatron=dataclasses.replace(config.megatron, transformer=transformer),
                )
                yield from _with_engines(changed, model, cluster)


def _layouts(world: int, model: Architecture, cluster: Cluster) -> Iterator[ParallelConfig]:
    for tensor in _divisors(min(world, cluster.gpus_per_node)):
        for pipeline in _PIPELINES:
            for context in _CONTEXTS:
                data, rest = divmod(world, tensor * pipeline * context)
                if rest or not data:
                    continue
                for expert in _divisors(tensor * context * data) if model.is_moe else [1]:
                    layout = ParallelConfig(tensor, pipeline, context, data, expert)
                    try:
                        layout.check(model)
                    except UserError:
                        continue
                    yield layout


def _recomputations(config: Config, model: Architecture) -> list[dict[str, Any]]:
    """Megatron's transformer settings: as they are, and with none, cheap and full recomputation."""
    given = config.megatron.transformer
    others = {name: value for name, value in given.items() if name not in _RECOMPUTE_FIELDS}
    # Without experts Transformer Engine's norms are parts of other modules.
    cheap = ["layernorm", "moe_act"] if model.is_moe else ["mlp"]
    selective = {"recompute_granularity": "selective", "recompute_modules": cheap}
    options = [given, others, others | selective, others | _FULL]
    return [option for i, option in enumerate(options) if option not in options[:i]]


def _with_engines(config: Config, model: Architecture, cluster: Cluster) -> Iterator[Config]:
    try:
        memory = plan_memory(config, model, cluster)
    except UserError:
        return
    training = [phase for phase in memory.phases if phase.phase == "train"]
    if memory.placement != "shared, at once" and not all(phase.fits for phase in training):
        return
    yield config
    if memory.engine is None or not memory.problems or memory.placement == "own process":
        return
    ranks = ranks_per_node(config, cluster)
    for tensor in _divisors(ranks):
        if tensor < EngineShape.of(config).tensor:
            continue
        for share in _SHARES:
            arguments = config.rollout.engine_args | {
                "tensor_parallel_size": tensor,
                "gpu_memory_utilization": share,
            }
            rollout = dataclasses.replace(
                config.rollout, engine_args=arguments, engines_per_node=ranks // tensor
            )
            yield dataclasses.replace(config, rollout=rollout)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _changes(before: Config, after: Config) -> dict[str, Any]:
    """The settings that differ, by their names in a config file."""
    changes: dict[str, Any] = {}
    for section in ("parallel", "rollout", "train"):
        old, new = getattr(before, section), getattr(after, section)
        for field in dataclasses.fields(new):
            value = getattr(new, field.name)
            if value != getattr(old, field.name):
                changes[f"{section}.{field.name}"] = value
    if after.megatron.transformer != before.megatron.transformer:
        changes["megatron.transformer"] = after.megatron.transformer
    return changes


def _yaml(value: Any) -> str:
    """A value in YAML's flow style, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
