# SPDX-License-Identifier: Apache-2.0
"""What a killed run leaves, and whether a finished one is the same as another."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rl.checkpoint.folder import CheckpointFolder
from megatron.rl.checkpoint.manifest import find_damage

# Metrics that depend on the clock; records of saves are left out as a whole.
_CLOCK = ("time/", "tokens_per_s", "memory/", "bridge/seconds", "bridge/probe_seconds")


@dataclass(frozen=True)
class Remains:
    """A run's folder after a kill.

    Attributes:
        steps: optimizer steps that its metrics know.
        saved: steps in the newest complete checkpoint; 0 without one.
        faults: what may not be there.
    """

    steps: int
    saved: int
    faults: tuple[str, ...]


def inspect(run: Path) -> Remains:
    """Look at what a kill has left; all checkpoints have to be whole, digests included."""
    complete, refused = CheckpointFolder(run / "checkpoints").survey()
    faults = [f"{checkpoint.path.name}: {checkpoint.reason}" for checkpoint in refused]
    for checkpoint in complete:
        damage = find_damage(checkpoint.path, checkpoint.manifest)
        if damage is not None:
            faults.append(f"{checkpoint.path.name}: {damage}")
    steps = [record["number"] for record in read_metrics(run) if record["kind"] == "step"]
    saved = complete[0].name.step if complete else 0
    return Remains(max(steps, default=0), saved, tuple(faults))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def differences(run: Path, reference: Path) -> list[str]:
    """Say what two finished runs differ in: exported files, metrics, checkpoints, or leftovers."""
    found = []
    ours, theirs = _digests(run / "policy"), _digests(reference / "policy")
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            found.append(f"policy/{name} differs")
    found += _metric_differences(run, reference)
    if not (run / "result.json").exists():
        found.append("no result.json")
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    if left := [name for name in names if name.startswith(".")]:
        found.append(f"left in checkpoints: {', '.join(left)}")
    newest = [_newest_weights(folder) for folder in (run, reference)]
    if newest[0] != newest[1]:
        found.append(f"newest checkpoint: {newest[0]} instead of {newest[1]}")
    if partial := [path.name for path in run.iterdir() if ".partial" in path.name]:
        found.append(f"left in the run's folder: {', '.join(partial)}")
    return found + list(inspect(run).faults)


def _newest_weights(run: Path) -> tuple[int, dict[str, str]]:
    """Return step and digests of the tensors' files in the newest checkpoint."""
    complete, _ = CheckpointFolder(run / "checkpoints").survey()
    if not complete:
        return 0, {}
    folder = complete[0].path
    return complete[0].name.step, {
        name: digest for name, digest in _digests(folder).items() if name.endswith(".distcp")
    }


def _metric_differences(run: Path, reference: Path) -> list[str]:
    ours, theirs = _timeless(run), _timeless(reference)
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            where = f"metrics, {other['kind']} {other['number']}"
            if (mine["kind"], mine["number"]) != (other["kind"], other["number"]):
                return [f"{where}: found {mine['kind']} {mine['number']}"]
            names = [n for n in {**mine, **other} if mine.get(n) != other.get(n)]
            first = names[0]
            return [f"{where}: {first} {mine.get(first)!r} instead of {other.get(first)!r}"]
    if len(ours) != len(theirs):
        return [f"metrics: {len(ours)} lines instead of {len(theirs)}"]
    return []


def _timeless(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(_CLOCK)}
        for record in read_metrics(run)
        if record["kind"] != "checkpoint"
    ]


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*"))
        if path.is_file()
    }
