# SPDX-License-Identifier: Apache-2.0
"""Responses that the scoring processes score per second, and what a process of one's own costs.

    python benchmarks/scoring.py [--json PATH]       the rates
    python benchmarks/scoring.py --check             `name value target ok|short` lines
    python benchmarks/scoring.py --task NAME --params JSON --responses FILE
                                                     any task, responses from a file of JSON strings

Three loads: a task that compares integers, scored batch by batch as sequences end; the same with a
response that hangs in every batch, whose time limit is taken off; and replacing a process. Without
``--responses``, a task other than the integers is scored on its own reference answers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment
from benchmarks.scoring_integers import Integers
from benchmarks.targets import Target, as_json
from megatron.rl.rewards.registry import TaskSpec, make_task
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


def measure_task(
    spec: TaskSpec, responses: Path | None, count: int, rounds: int
) -> tuple[dict[str, Any], list[Target]]:
    """Any task, on responses from a file or on its own reference answers."""
    task: Any = make_task(spec)
    prompts = [task.prompt("train", 0, index) for index in range(count)]
    if responses is None:
        texts = [task.reference_answer(prompt) for prompt in prompts]
    else:
        texts = [json.loads(line) for line in responses.read_text().splitlines()][:count]
        prompts = prompts[: len(texts)]
    times = measure(spec, texts, prompts, max(BATCHES), rounds)
    rate = 1 / times.wall_s
    target = Target(f"{spec.name}/per_s", rate, MIN_GENERAL_PER_S, at_least=True)
    return {"responses": len(texts), "per_s": rate, "own_us": times.own_s * 1e6}, [target]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--task", help="measure this task instead of integers")
    parser.add_argument("--params", type=json.loads, default={}, help="its task.params, as JSON")
    parser.add_argument("--responses", type=Path, help="a JSON string a line, in prompt order")
    parser.add_argument("--count", type=int, default=512, help="prompts of --task")
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": describe_environment()}
    limits = ScoringLimits()
    results["limits"] = asdict(limits) | {"workers": limits.worker_count()}
    if options.task is None:
        measured, targets = measure_integers(options.rounds)
    else:
        spec = TaskSpec(options.task, options.params)
        measured, targets = measure_task(spec, options.responses, options.count, options.rounds)
    results |= {"measured": measured, "targets": as_json(targets)}
    for target in targets:
        print(target.line(), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if not options.check or all(target.met for target in targets) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
