# SPDX-License-Identifier: Apache-2.0
"""Kill runs, one after another, until there were enough kills; note each of them.

``kills.jsonl`` has a line for each kill and for each finished run: a campaign that was interrupted
itself continues behind the last one. Runs that differ, or failed, are kept.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tools.kills import stacks
from tools.kills.moments import POLL_S, Aim, Durations, Watch, choose
from tools.kills.outcome import Remains, differences, inspect
from tools.kills.starts import ForkedRun, Started, Starter

# All processes of a killed run are gone after so long, or it is a fault.
GONE_LIMIT_S = 60.0
# A run that neither ends nor shows what is waited for hangs.
HANG_LIMIT_S = 600.0
MAX_FAULTS = 5
_SHOWN = 400  # characters of a run's output, in a fault

# Who is killed, and how often that is drawn.
VICTIMS = {"all": 0.35, "launcher": 0.15, "rank": 0.2, "engine": 0.3}


@dataclass(frozen=True)
class Plan:
    """What all runs of a campaign have in common.

    Attributes:
        arguments: of ``pdm-rl train``, without the folder.
        steps_per_batch: optimizer steps between two saves.
        reference: folder of the run that nobody killed.
    """

    folder: Path
    kills: int
    seed: int
    arguments: Sequence[str]
    steps_per_batch: int
    reference: Path


@dataclass
class Campaign:
    """Kills runs; see the module.

    Args:
        say: shows a line of progress.
    """

    plan: Plan
    starter: Starter
    say: Callable[[str], None]
    records: list[dict[str, Any]] = field(default_factory=list)
    _durations: Durations = field(default_factory=Durations)

    @property
    def kills(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "kill"]

    @property
    def faults(self) -> list[str]:
        return [fault for record in self.records for fault in record["faults"]]

    def run(self) -> None:
        """Kill until there were enough kills, then let the last run finish."""
        journal = self.plan.folder / "kills.jsonl"
        if journal.exists():
            self.records = [json.loads(line) for line in journal.read_text().splitlines()]
        while len(self.faults) < MAX_FAULTS:
            enough = len(self.kills) >= self.plan.kills
            if enough and self.records and self.records[-1]["kind"] == "finished":
                return
            record = self._once(None if enough else len(self.kills) + 1)
            self.records.append(record)
            with journal.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _once(self, number: int | None) -> dict[str, Any]:
        """Start or continue a run until it is killed or finished; ``number`` of the kill."""
        index = sum(record["kind"] != "kill" for record in self.records)
        run = self.plan.folder / "runs" / f"{index:03d}"
        run.parent.mkdir(exist_ok=True)
        random = np.random.default_rng([self.plan.seed, number or 0, len(self.records)])
        resume = (run / "config.yaml").exists() and bool(random.random() < 0.7)
        arguments = ["resume", str(run)] if resume else self._train_arguments(run, index)
        started = time.monotonic()
        process = self.starter.start(arguments, f"{len(self.records):04d}")
        watch = Watch(run, process.output, self.plan.steps_per_batch, self._durations)
        record: dict[str, Any] = {"run": index, "how": arguments[0]}
        if number is not None:
            aim, count, share = choose(random)
            if self._wait(process, watch, aim, count, share):
                before = self._saved_before(index)
                record |= self._kill(process, run, watch, random, aim, number, started)
                if record["saved"] < before:
                    record["faults"].append(f"step {record['saved']} after {before} was saved")
                return record
        code = self._wait_for_end(process, watch)
        return self._finished(record, process, run, code, started)

    def _train_arguments(self, run: Path, index: int) -> list[str]:
        saves = ["--set", f"checkpoint.async_save={str(index % 2 == 0).lower()}"]
        return ["train", *self.plan.arguments, *saves, "--run-folder", str(run)]

    def _saved_before(self, index: int) -> int:
        return max((record["saved"] for record in self.kills if record["run"] == index), default=0)

    def _wait(self, process: Started, watch: Watch, aim: Aim, count: int, share: float) -> bool:
        """Return whether the moment has come; not, if the run has ended before."""
        deadline = time.monotonic() + HANG_LIMIT_S
        while aim.sign and watch.seen[aim.sign] < count:
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            watch.look()
            time.sleep(POLL_S)
        until = time.monotonic() + share * self._durations.seconds[aim.lasts]
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 10 * POLL_S))
            watch.look()
        return process.poll() is None

    def _wait_for_end(self, process: Started, watch: Watch) -> int | None:
        deadline = time.monotonic() + HANG_LIMIT_S
        while (code := process.poll()) is None and time.monotonic() < deadline:
            watch.look()
            time.sleep(10 * POLL_S)
        return code

    def _kill(
        self,
        process: Started,
        run: Path,
        watch: Watch,
        random: np.random.Generator,
        aim: Aim,
        number: int,
        started: float,
    ) -> dict[str, Any]:
        """Kill some of a run's processes, see all of them go, and look at what is left."""
        everything = process.everything()
        ranks = process.ranks()
        victim, victims = self._victims(process, everything, ranks, watch, random)
        doing = stacks.Activity(stacks.START_UP)
        if ranks:
            doing = stacks.ask(ranks[0], self.starter.stacks)
        if doing.phase == stacks.START_UP and (run / "result.json").exists():
            doing = stacks.Activity("end")
        after_s = time.monotonic() - started
        for one in victims:
            _send_kill(one)
        faults: list[str] = []
        if victim == "engine":
            faults += self._see_survival(process, run)
            everything = process.everything()
            for one in everything:
                _send_kill(one)
        elif isinstance(process, ForkedRun) and victim == "rank":
            time.sleep(float(random.random()))  # others stay for a while, as under torchrun
            for one in everything:
                _send_kill(one)
        faults += self._see_them_go(process, everything)
        left = inspect(run)
        lost = left.steps - left.saved
        if lost > 2 * self.plan.steps_per_batch:
            faults.append(f"{lost} steps lost")
        record = {
            "kind": "kill",
            "number": number,
            "aim": aim.name,
            "phase": doing.phase,
            "saving": doing.saving,
            "victim": victim,
            "after_s": round(after_s, 2),
            "steps": left.steps,
            "saved": left.saved,
            "faults": [*faults, *left.faults],
        }
        self._say_kill(record, left)
        return record

    def _victims(
        self,
        process: Started,
        everything: Sequence[psutil.Process],
        ranks: Sequence[psutil.Process],
        watch: Watch,
        random: np.random.Generator,
    ) -> tuple[str, Sequence[psutil.Process]]:
        names = list(VICTIMS)
        weights = np.array(list(VICTIMS.values()))
        name = names[random.choice(len(names), p=weights / weights.sum())]
        place = int(random.integers(max(len(ranks), 1)))
        engines = [one for one in everything if "rollout.worker" in _command(one)]
        ready = watch.seen["evaluating"] or watch.seen["step"]
        if name == "engine" and engines and ready:
            return name, engines
        if name == "rank" and len(ranks) > 1:
            return name, [ranks[place]]
        if name == "launcher" and not isinstance(process, ForkedRun):
            return name, everything[:1]
        return "all", everything

    def _see_survival(self, process: Started, run: Path) -> list[str]:
        """A run goes on after the loss of its engine: it trains on, or comes to its end."""
        before = inspect(run).steps
        deadline = time.monotonic() + HANG_LIMIT_S
        while (code := process.poll()) is None and time.monotonic() < deadline:
            if inspect(run).steps > before:
                return []
            time.sleep(0.1)
        if code == 0:
            return []
        return [f"the run did not survive its engine (exit code {code}): {_last_words(process)}"]

    def _see_them_go(self, process: Started, everything: Sequence[psutil.Process]) -> list[str]:
        deadline = time.monotonic() + GONE_LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(10 * POLL_S)
        gone_by = max(1.0, deadline - time.monotonic())
        _, alive = psutil.wait_procs(everything, timeout=gone_by)
        alive = [one for one in alive if _runs(one)]
        faults = [f"still running: {_command(one)}" for one in alive]
        for one in alive:
            _send_kill(one)
        return faults

    def _finished(
        self,
        record: dict[str, Any],
        process: Started,
        run: Path,
        code: int | None,
        started: float,
    ) -> dict[str, Any]:
        if code == 0:
            faults = differences(run, self.plan.reference)
            if not faults:
                shutil.rmtree(run)  # the same as the reference
        else:
            for one in process.everything():
                _send_kill(one)
            how = "hangs" if code is None else f"ended with {code}"
            faults = [f"{run.name} {how} without being killed: {_last_words(process)}"]
        verdict = "; ".join(faults) if faults else "identical to the run that nobody killed"
        kills = sum(one["run"] == record["run"] for one in self.kills)
        took = time.monotonic() - started
        self.say(f"run {run.name} finished after {kills} kills ({took:.1f} s): {verdict}")
        return record | {"kind": "finished", "code": code, "faults": faults}

    def _say_kill(self, record: dict[str, Any], left: Remains) -> None:
        width = len(str(self.plan.kills))
        saving = " and saving" if record["saving"] else ""
        text = (
            f"kill {record['number']:{width}d}/{self.plan.kills}: {record['victim']}, in "
            f"{record['phase']}{saving}, after {record['after_s']:.1f} s, at step {left.steps}, "
            f"{left.steps - left.saved} lost"
        )
        self.say("; ".join([text, *(f"FAULT {fault}" for fault in record["faults"])]))


def _send_kill(process: psutil.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _last_words(process: Started) -> str:
    return process.output.read_text(errors="replace")[-_SHOWN:].strip()
