# SPDX-License-Identifier: Apache-2.0
"""Responses that the scoring processes score per second, and what a process of one's own costs.

    python benchmarks/scoring.py [--json PATH]       the rates
    python benchmarks/scoring.py --check             `name value target ok|short` lines

Integers, scored batch by batch as sequences end; the same with a response that hangs in every
batch, beyond its time limit; and general answers, half of them right, in three loads: all
different, as in training (eight responses to each problem), and only such as sympy has to compare.
No process has seen any of them before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment
from benchmarks.scoring_general import GeneralLoad, general_load
from benchmarks.scoring_integers import Integers
from benchmarks.targets import Target, as_json
from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_pool import ScoringPool
from megatron.rl.rewards.task import Prompt

# Responses in a batch as an engine delivers them, a few sequences at a time, and all at once.
BATCHES = (8, 512)
RESPONSES = 4096
HANGING_TIMEOUT_S = 0.25
HANGING_BATCHES = 4
MIN_INTEGERS_PER_S = 2000.0
MAX_OVERHEAD_US = 100.0
MIN_GENERAL_PER_S = 300.0
MAX_REPLACEMENT_MS = 50.0
# General responses in a round, and the loads: only symbolic ones, responses to each problem.
GENERAL = 1024
GENERAL_LOADS = {"different": (False, 1), "groups_of_8": (False, 8), "symbolic": (True, 1)}

INTEGERS = TaskSpec("benchmarks.scoring_integers:Integers")


@dataclass(frozen=True)
class Times:
    """Of one response, seconds: all that passed, and processor time of the trainer's process."""

    wall_s: float
    own_s: float


def measure(
    spec: TaskSpec, responses: Sequence[str], prompts: Sequence[Prompt], batch: int, rounds: int
) -> Times:
    """Return medians over rounds; the first round of a pool is not counted."""
    wall, own = [], []
    with ScoringPool(spec, ScoringLimits()) as pool:
        for _ in range(rounds + 1):
            started, worked = time.perf_counter(), time.process_time()
            for first in range(0, len(responses), batch):
                some = slice(first, first + batch)
                scored = pool.score(responses[some], prompts[some])
                if scored.failures:
                    raise SystemExit(f"error: a response was not scored: {scored.first_error}")
            wall.append((time.perf_counter() - started) / len(responses))
            own.append((time.process_time() - worked) / len(responses))
    return Times(statistics.median(wall[1:]), statistics.median(own[1:]))


def measure_replacement() -> float:
    """Return seconds that a batch with a hanging response takes beyond its time limit."""
    prompts = [Integers().prompt("train", 0, 1)] * 8
    beyond = []
    with ScoringPool(INTEGERS, ScoringLimits(timeout_s=HANGING_TIMEOUT_S)) as pool:
        pool.score(["1"] * 8, prompts)
        for _ in range(HANGING_BATCHES):
            started = time.perf_counter()
            scored = pool.score(["1", "hang", *["1"] * 6], prompts)
            beyond.append(time.perf_counter() - started - HANGING_TIMEOUT_S)
            assert scored.timed_out == 1 and scored.scores.sum() == 7
    return statistics.median(beyond)


def measure_integers(rounds: int) -> tuple[dict[str, Any], list[Target]]:
    """Integers, as they come from an engine and at once."""
    prompts = [Integers().prompt("train", 0, index) for index in range(RESPONSES)]
    responses = [str(index) for index in range(RESPONSES)]
    started = time.perf_counter()
    task = Integers()
    for response, prompt in zip(responses, prompts, strict=True):
        task.reward(response, prompt)
    direct = (time.perf_counter() - started) / RESPONSES
    measured: dict[str, Any] = {"direct_us": direct * 1e6}
    targets = []
    for batch in BATCHES:
        times = measure(INTEGERS, responses, prompts, batch, rounds)
        rate, overhead = 1 / times.wall_s, (times.wall_s - direct) * 1e6
        own_us = times.own_s * 1e6
        measured[f"batch_{batch}"] = {"per_s": rate, "overhead_us": overhead, "own_us": own_us}
        targets += [
            Target(f"integers/batch_{batch}/per_s", rate, MIN_INTEGERS_PER_S, at_least=True),
            Target(f"integers/batch_{batch}/overhead_us", overhead, MAX_OVERHEAD_US),
        ]
    replacement_ms = measure_replacement() * 1e3
    measured["replacement_ms"] = replacement_ms
    return measured, [*targets, Target("replacement_ms", replacement_ms, MAX_REPLACEMENT_MS)]


def measure_general(rounds: int) -> tuple[dict[str, Any], list[Target]]:
    """Answers that are no integers; every round has others and a pool of its own."""
    measured, targets = {}, []
    for name, (symbolic, group) in GENERAL_LOADS.items():
        wall, processor = [], []
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(rounds):
                load = general_load(
                    Path(folder), GENERAL // group, seed, symbolic=symbolic, group=group
                )
                times = _general_times(load)
                wall.append(times.wall_s)
                processor.append(times.processor_s)
        rate = 1 / statistics.median(wall)
        per_core = 1 / statistics.median(processor)
        measured[name] = {"per_s": rate, "per_processor_second": per_core}
        targets.append(Target(f"general/{name}/per_s", rate, MIN_GENERAL_PER_S, at_least=True))
    return measured, targets


@dataclass(frozen=True)
class GeneralTimes:
    """Of one response, seconds: all that passed, and processor time of the scoring processes."""

    wall_s: float
    processor_s: float


def _general_times(load: GeneralLoad) -> GeneralTimes:
    before = _ended_children_s()
    with ScoringPool(load.task, ScoringLimits()) as pool:
        pool.start()
    loading = _ended_children_s() - before
    with ScoringPool(load.task, ScoringLimits()) as pool:
        pool.start()
        started = time.perf_counter()
        scored = pool.score(load.responses, load.prompts)
        wall = time.perf_counter() - started
    processor = _ended_children_s() - before - 2 * loading
    if scored.failures or scored.scores.tolist() != list(load.scores):
        raise SystemExit(f"error: a response was scored wrongly: {scored.first_error}")
    count = len(load.responses)
    return GeneralTimes(wall / count, processor / count)


def _ended_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": describe_environment()}
    limits = ScoringLimits()
    results["limits"] = asdict(limits) | {"workers": limits.worker_count()}
    integers, targets = measure_integers(options.rounds)
    general, general_targets = measure_general(options.rounds)
    targets += general_targets
    results["measured"] = {"integers": integers, "general": general}
    results["targets"] = as_json(targets)
    for target in targets:
        print(target.line(), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if not options.check or all(target.met for target in targets) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
