# SPDX-License-Identifier: Apache-2.0
"""Start `pdm-rl train` as a user does, and look at what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CONFIG = """
run: {{name: test, device: cpu, folder: {folder}}}
model: {{path: {model}, dtype: float32}}
task: {{name: "tests.e2e.parity_task:ParityTask"}}
parallel: {{tensor: 2, expert: 2}}
rollout: {{prompts: 8, group_size: 4, max_prompt_tokens: 64, max_response_tokens: 12}}
train: {{rollouts: 2, minibatch_prompts: 2, learning_rate: 1.0e-3}}
loss: {{threshold: 0.01}}
eval: {{prompts: 16}}
"""
RUN_TIMEOUT_S = 240.0


@dataclass
class Run:
    """A finished or running `pdm-rl train`."""

    process: subprocess.Popen[str]
    folder: Path

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> tuple[int, str]:
        """Return exit code and output (stderr included); kill it if it hangs."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            output, _ = self.process.communicate(timeout=30)
            raise AssertionError(f"the run did not end in {timeout_s} s:\n{output}") from None
        return self.process.returncode, output

    @property
    def run_folder(self) -> Path:
        (folder,) = self.folder.iterdir()
        return folder

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_rollout(self, count: int, timeout_s: float = 120.0) -> None:
        """Block until `count` rollout batches have been trained on."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early:\n{self.wait()[1]}")
            try:
                if len(self.metrics("rollout")) >= count:
                    return
            except (ValueError, FileNotFoundError, NotADirectoryError):
                pass  # not there yet
            time.sleep(0.1)
        raise AssertionError("no rollout in time")


def start(folder: Path, model: Path, overrides: Sequence[str] = ()) -> Run:
    """Start a run whose files go under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    runs = folder / "runs"
    config.write_text(CONFIG.format(folder=runs, model=model))
    settings = [part for override in overrides for part in ("--set", override)]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron.rl.cli", "train", str(config), *settings],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return Run(process, runs)


def engine_process(run: Run) -> psutil.Process:
    """Return the process of the rollout engine."""
    for process in run.descendants():
        if any("rollout.worker" in part for part in process.cmdline()):
            return process
    raise AssertionError("no engine process")


def wait_for_engine(run: Run, timeout_s: float = 60.0) -> psutil.Process:
    """Block until the engine's process has been started, and return it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            return engine_process(run)
        except (AssertionError, psutil.NoSuchProcess, psutil.ZombieProcess):
            time.sleep(0.1)
    raise AssertionError("no engine process in time")


def rank_processes(run: Run) -> list[psutil.Process]:
    """Return the trainer ranks, in order."""
    return sorted(
        (p for p in run.descendants() if any("megatron.rl.rank" in part for part in p.cmdline())),
        key=lambda process: process.pid,
    )


def assert_all_gone(processes: Sequence[psutil.Process], within_s: float = 10.0) -> None:
    """Fail if any of the processes still runs after a while."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"still running: {[p.cmdline() for p in alive]}"
