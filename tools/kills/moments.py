# SPDX-License-Identifier: Apache-2.0
"""Choose when to kill a run, evenly over what it does rather than over time.

Nearly all of a run's time is start-up and optimizer steps. So the killer waits for something that
can be seen from outside (a line of metrics, a folder, a word that the run prints), and from there
a random while, up to what the phase behind it has taken before.
"""

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

POLL_S = 0.001


@dataclass(frozen=True)
class Aim:
    """What to wait for.

    Attributes:
        sign: what has to be seen; empty: nothing, but the start.
        most: up to how many of it are waited for.
        lasts: whose duration bounds the random while that follows.
        weight: how often it is drawn.
    """

    name: str
    sign: str
    most: int
    lasts: str
    weight: float


AIMS = (
    Aim("start", "", 1, "start", 1.0),
    Aim("step", "step", 10, "step", 1.5),
    Aim("sync", "trained", 2, "sync", 3.0),
    Aim("rollout", "rollout", 2, "rollout", 3.0),
    Aim("save", "saving", 2, "save", 2.5),
    Aim("publish", "saved", 2, "publish", 1.0),
    Aim("evaluation", "evaluating", 1, "evaluation", 2.0),
    Aim("export", "exporting", 1, "export", 2.0),
    Aim("any", "", 1, "batch", 2.0),
)


@dataclass
class Durations:
    """Seconds that phases have taken, as seen in earlier runs; guesses before."""

    seconds: dict[str, float] = field(
        default_factory=lambda: {
            "start": 4.0,
            "step": 0.1,
            "sync": 0.1,
            "rollout": 0.1,
            "save": 0.1,
            "publish": 0.02,
            "evaluation": 0.1,
            "export": 0.03,
            "batch": 8.0,
        }
    )

    def learn(self, record: dict[str, Any]) -> None:
        """Take what a line of metrics says."""
        seen = self.seconds
        if record["kind"] == "rollout":
            train = record["time/train_s"]
            seen["sync"] = record["time/weights_s"]
            seen["step"] = train / max(record["optimizer_steps"], 1)
            # Behind a batch come the save, if it does not run beside, and the next rollout.
            others = train + record["time/weights_s"]
            seen["rollout"] = record["time/total_s"] - others + 0.3 * seen["save"]
            seen["batch"] = seen["start"] + 1.5 * record["time/total_s"]
        elif record["kind"] == "checkpoint" and record.get("write_s"):
            seen["save"] = record["write_s"]


class Watch:
    """Looks at a run from outside.

    Attributes:
        seen: how often each sign has been seen since this start.
    """

    def __init__(self, run: Path, output: Path, steps_per_batch: int, durations: Durations) -> None:
        self._metrics = run / "metrics.jsonl"
        self._checkpoints = run / "checkpoints"
        self._output = output
        self._steps_per_batch = steps_per_batch
        self._durations = durations
        self._offset = _size(self._metrics)
        self._names = _names(self._checkpoints)
        self._printed = 0
        self._started = time.monotonic()
        self._evaluating_since: float | None = None
        self.seen: Counter[str] = Counter()

    def look(self) -> None:
        """Count what is new."""
        self._look_at_metrics()
        names = _names(self._checkpoints)
        new = names - self._names
        self._names = names
        self.seen["saving"] += sum(".partial-" in name for name in new)
        self.seen["saved"] += sum(not name.startswith(".") for name in new)
        size = _size(self._output)
        if size > self._printed:
            text = self._output.read_bytes()
            self._printed = len(text)
            self._count_printed(text)

    def _look_at_metrics(self) -> None:
        size = _size(self._metrics)
        if size < self._offset:  # cut back to the checkpoint
            self._offset = size
        if size == self._offset:
            return
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            self._durations.learn(record)
            self.seen[record["kind"]] += 1
            if record["kind"] == "eval" and self._evaluating_since is not None:
                took = time.monotonic() - self._evaluating_since
                self._durations.seconds["evaluation"] = took
            if record["kind"] == "step" and record["number"] % self._steps_per_batch == 0:
                self.seen["trained"] += 1

    def _count_printed(self, text: bytes) -> None:
        if not self.seen["ready"] and b"starting the rollout" in text:
            self.seen["ready"] = 1
            self._durations.seconds["start"] = 1.5 * (time.monotonic() - self._started) + 1.0
        evaluating = text.count(b"evaluating ")
        if evaluating > self.seen["evaluating"]:
            self._evaluating_since = time.monotonic()
        self.seen["evaluating"] = evaluating
        self.seen["exporting"] = text.count(b"writing the policy")


def choose(random: np.random.Generator) -> tuple[Aim, int, float]:
    """Draw an aim, how many of its sign to wait for, and the share of the while behind it.

    Small shares are drawn more often: a sign is seen late, when the phase has begun.
    """
    weights = np.array([aim.weight for aim in AIMS])
    aim = AIMS[random.choice(len(AIMS), p=weights / weights.sum())]
    return aim, int(random.integers(1, aim.most + 1)), float(random.random()) ** 2


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
