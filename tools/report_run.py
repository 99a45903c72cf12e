#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print what a run measured, from its metrics.jsonl: one short table.

Log-probs of policy and engine before the first update, their mismatch after it, what the mask
vetoed, reward, times, peak memory.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_metrics(folder: Path) -> dict[str, list[Record]]:
    """Return the records of a run by kind: `step`, `rollout` and `eval`, each in order.

    Raises:
        ValueError: no metrics there, or no optimizer step among them.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"expected a run folder with metrics.jsonl, found none in {folder}")
    kinds: dict[str, list[Record]] = {"step": [], "rollout": [], "eval": []}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        kinds.setdefault(record["kind"], []).append(record)
    if not kinds["step"] or not kinds["rollout"]:
        raise ValueError(f"{path} has no finished rollout batch with an optimizer step yet")
    return kinds


def report(folder: Path) -> str:
    """Return the table of a run, a line each."""
    kinds = read_metrics(folder)
    steps, rollouts = kinds["step"], kinds["rollout"]
    first, tokens = steps[0], sum(step["tokens"] for step in steps)
    vetoed = sum(step["vetoed_tokens"] for step in steps)
    train_s = [rollout["time/train_s"] / max(rollout["optimizer_steps"], 1) for rollout in rollouts]
    total_s = [rollout["time/total_s"] for rollout in rollouts]
    lines = [
        ("before the first update", ""),
        ("  |log pi - log mu|, mean", _nats(first, "mismatch/engine/log_prob_mean")),
        ("  |log pi - log mu|, max", _nats(first, "mismatch/engine/log_prob_max")),
        ("  over response tokens", str(first["tokens"])),
        ("in all", ""),
        ("  optimizer steps, tokens", f"{len(steps)}, {tokens}"),
        ("  vetoed tokens", f"{vetoed} ({100 * vetoed / max(tokens, 1):.2f} %)"),
        ("  outside the trust region", _share(steps, "outside_fraction", tokens)),
        ("  engine mismatch, max", _largest(steps, "mismatch/engine/log_prob_max")),
        ("  total mismatch, max", _largest(steps, "mismatch/total/log_prob_max")),
        ("  probe after updates, max", _largest(rollouts, "bridge/probe_max")),
        ("  step, s", _range(train_s)),
        ("  rollout batch, s", _range(total_s)),
        ("  peak memory of a rank", _memory(rollouts)),
        ("reward by rollout batch", " ".join(f"{one['reward']:.3f}" for one in rollouts)),
        ("  groups without signal", _list(rollouts, "groups_without_signal")),
        ("  truncated", _list(rollouts, "truncated")),
        ("  vetoed share, %", " ".join(f"{100 * one['clip_fraction']:.2f}" for one in rollouts)),
    ]
    if kinds["eval"]:
        held_out = " -> ".join(
            f"{one['heldout_reward']:.3f} +- {one['heldout_reward_stderr']:.3f}"
            for one in kinds["eval"]
        )
        lines.append(("held-out reward", held_out))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:{width}}{value}".rstrip() for name, value in lines)


def _nats(record: Record, name: str) -> str:
    value = record.get(name)
    return "not measured" if value is None else f"{value:.2e} nats"


def _largest(records: Sequence[Record], name: str) -> str:
    values = [one[name] for one in records if one.get(name) is not None]
    return f"{max(values):.2e} nats" if values else "not measured"


def _share(steps: Sequence[Record], name: str, tokens: int) -> str:
    """Return a share of all tokens, from the shares of steps."""
    return f"{100 * sum(one[name] * one['tokens'] for one in steps) / max(tokens, 1):.2f} %"


def _list(records: Sequence[Record], name: str) -> str:
    return " ".join(f"{one[name]:.3f}" for one in records)


def _range(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.1f} (from {min(values):.1f} to {max(values):.1f})"


def _memory(rollouts: Sequence[Record]) -> str:
    # A peak never falls: the last is the run's.
    peak = rollouts[-1].get("memory/peak_gib")
    return "not measured" if peak is None else f"{peak:.2f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0: printed, 2: no run with metrics there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="run folder")
    values = parser.parse_args(arguments)
    try:
        print(report(values.folder))
    except ValueError as error:
        print(f"report_run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
