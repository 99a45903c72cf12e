# SPDX-License-Identifier: Apache-2.0
"""A run's plan as a table for people and as JSON for programs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.rl.planning.activations import Recompute
from megatron.rl.planning.engine_memory import GIB, EngineShape
from megatron.rl.planning.layout_search import Suggestion
from megatron.rl.planning.memory import MemoryPlan
from megatron.rl.planning.parameters import active_parameters, rank_parameters, total_parameters
from megatron.rl.planning.precision import training_precision
from megatron.rl.planning.run_plan import RunPlan

GB = 1e9


def text_report(plan: RunPlan, suggestion: Suggestion | None) -> str:
    """Return the plan in lines of at most 100 columns."""
    sections = [_head(plan), _memory(plan.memory), _traffic(plan), _times(plan)]
    lines = [line for section in sections for line in (*section, "")]
    return "\n".join([*lines, *_verdict(plan, suggestion)])


def json_report(plan: RunPlan, suggestion: Suggestion | None) -> dict[str, Any]:
    """Return the plan as nested dicts; bytes and seconds, unrounded."""
    memory = plan.memory
    report = {
        "fits": not plan.problems,
        "problems": list(plan.problems),
        "parameters": {
            "total": total_parameters(plan.model),
            "active": active_parameters(plan.model),
            "ranks": [
                dataclasses.asdict(rank_parameters(plan.model, plan.config.parallel, stage))
                for stage in range(plan.config.parallel.pipeline)
            ],
        },
        "memory": {
            "placement": memory.placement,
            "stages": [dataclasses.asdict(stage) for stage in memory.training],
            "engine": None if memory.engine is None else dataclasses.asdict(memory.engine),
            "kv_cache": memory.kv_cache,
            "kv_cache_sequences": memory.sequences,
            "host_a_node": memory.host_a_node,
            "phases": [
                {"phase": p.phase, "parts": dict(p.parts), "total": p.total, "limit": p.limit}
                for p in memory.phases
            ],
        },
        "traffic": dataclasses.asdict(plan.traffic),
        "times": [
            {"phase": t.phase, "seconds": t.seconds, "shares": dict(t.shares), "limit": t.limit}
            for t in plan.times
        ],
        "cluster": dataclasses.asdict(plan.cluster),
        "response_tokens": plan.response_tokens,
        "suggestion": None,
    }
    if suggestion is not None:
        report["suggestion"] = {
            "changes": suggestion.changes,
            "arguments": suggestion.arguments,
            "seconds": suggestion.plan.seconds,
        }
    return report


def _head(plan: RunPlan) -> Iterator[str]:
    model, layout, cluster = plan.model, plan.config.parallel, plan.cluster
    precision = training_precision(plan.config)
    yield (
        f"model: {total_parameters(model) / GB:.2f} B parameters, "
        f"{active_parameters(model) / GB:.2f} B active, {plan.config.model.dtype}"
        f"{', FP8 linear layers' if precision.fp8 else ''}"
    )
    yield (
        f"trainer: {layout.world_size} ranks, tensor {layout.tensor} x pipeline "
        f"{layout.pipeline} x context {layout.context} x data {layout.data}, expert "
        f"{layout.expert}; micro-batches of {plan.config.train.micro_batch_tokens} tokens"
    )
    yield f"recomputation: {Recompute.of(plan.config.megatron.transformer).describe()}"
    if plan.memory.engine is not None:
        yield (
            f"engines: {plan.engines} of {EngineShape.of(plan.config).gpus} GPUs, "
            f"{plan.memory.placement}; weights: {plan.config.bridge.quantization} quantization"
        )
    yield (
        f"cluster: {cluster.gpus} GPUs, {cluster.gpus_per_node} a node, {cluster.memory_gib:g} GiB "
        f"each; rates of {cluster.gpu.name}"
    )


def _memory(memory: MemoryPlan) -> Iterator[str]:
    yield "memory of the fullest GPU, GiB"
    names = list(dict.fromkeys(name for phase in memory.phases for name in phase.parts))
    phases = memory.phases
    yield f"  {'':22}" + "".join(f"{phase.phase:>10}" for phase in phases)
    for name in names:
        cells = (phase.parts.get(name) for phase in phases)
        yield f"  {name:22}" + "".join(
            f"{'' if size is None else f'{size / GIB:.2f}':>10}" for size in cells
        )
    yield f"  {'total':22}" + "".join(f"{phase.total / GIB:>10.2f}" for phase in phases)
    yield f"  {'of':22}" + "".join(f"{phase.limit / GIB:>10.2f}" for phase in phases)
    if memory.engine is not None:
        wanted = memory.engine.kv_wanted / GIB
        yield (
            f"KV cache: {memory.kv_cache / GIB:.1f} GiB hold {memory.sequences} sequences of "
            f"{memory.longest} tokens; rollout.max_num_seqs of them would take {wanted:.1f} GiB"
        )
    if memory.host_a_node:
        host = memory.host_a_node / GIB
        yield f"host memory of a node while the engine or the trainer rests: {host:.0f} GiB"


def _traffic(plan: RunPlan) -> Iterator[str]:
    traffic = plan.traffic
    yield f"a rollout batch, at a mean response of {plan.response_tokens} tokens"
    yield (
        f"  {traffic.sequences} sequences, {traffic.tokens / 1e6:.2f} M tokens, "
        f"{traffic.steps} optimizer steps"
    )
    rows = {
        "rollouts to the ranks": traffic.rollout_bytes,
        "weights to each engine": traffic.weight_bytes,
        "a rank: tensor parallelism": traffic.tensor_bytes,
        "a rank: experts": traffic.expert_bytes,
        "a rank: gradients and weights": traffic.gradient_bytes,
    }
    for name, size in rows.items():
        if size:
            yield f"  {name:30}{size / GB:>10.2f} GB"


def _times(plan: RunPlan) -> Iterator[str]:
    if not plan.times:
        yield "times: none on CPU, the stated rates are of GPUs"
        return
    yield "expected time, from stated rates and assumptions (not measured)"
    for phase in plan.times:
        yield f"  {phase.phase:10}{phase.seconds:>10.1f} s   most of it {phase.limit}"
        for name, seconds in sorted(phase.shares.items(), key=lambda item: -item[1]):
            if seconds > 0:
                yield f"    {name:38}{seconds:>10.1f} s"
    yield f"  {'total':10}{plan.seconds:>10.1f} s"


def _verdict(plan: RunPlan, suggestion: Suggestion | None) -> Iterator[str]:
    if plan.problems:
        yield "DOES NOT FIT"
        yield from (f"  {problem}" for problem in plan.problems)
        if suggestion is None:
            yield "no layout of these GPUs fits"
            return
        yield "a layout that fits:"
        yield f"  {suggestion.arguments}"
        worst = suggestion.plan.memory.worst
        spare = (worst.limit - worst.total) / GIB
        seconds = suggestion.plan.seconds
        yield f"  {spare:.1f} GiB to spare in {worst.phase}; {seconds:.0f} s a rollout batch"
        return
    worst = plan.memory.worst
    spare = (worst.limit - worst.total) / GIB
    yield (
        f"fits; memory binds first in {worst.phase}: {spare:.1f} GiB to spare, most taken by "
        f"{worst.largest}"
    )
    if plan.times:
        slowest = max(plan.times, key=lambda phase: phase.seconds)
        yield f"time binds first in {slowest.phase}: {slowest.limit}"
