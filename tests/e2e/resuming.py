# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped, killed and resumed, and what they must end with."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
# Differs from run to run: clocks, and the memory of the process.
UNREPEATABLE = ("time/", "tokens_per_s", "memory/", "bridge/seconds", "bridge/probe_seconds")
# A replay has no engine that could be given weights.
NO_ENGINE = ("bridge/",)


def write_config(path: Path, model: Path, **sections: dict[str, Any]) -> Path:
    """Write a run of 4 batches of 8 steps, which saves itself after every batch."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "device": "cpu", "folder": str(path.parent / "runs")},
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": "tests.e2e.parity_task:ParityTask"},
        "parallel": {"tensor": 2, "expert": 2},
        "rollout": {
            "prompts": 8,
            "group_size": 4,
            "max_prompt_tokens": 64,
            "max_response_tokens": 12,
            "threads": 1,
        },
        "train": {
            "rollouts": 4,
            "minibatch_prompts": 2,
            "epochs": 2,
            "learning_rate": 1.0e-3,
            "schedule": "linear",
            "warmup_steps": 5,
        },
        "loss": {"threshold": 0.01},
        "eval": {"prompts": 16, "every": 2},
        "checkpoint": {"every": 1},
    }
    for section, settings in sections.items():
        tree.setdefault(section, {}).update(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def replay_config(folder: Path, model: Path, sampled: Path, **sections: dict[str, Any]) -> Path:
    """Write a run on the rollouts that another one has recorded."""
    source = {"engine": "replay", "replay_from": str(sampled / "rollouts")}
    return write_config(folder / "config.yaml", model, rollout=source, **sections)


def pdm_rl(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start the program."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.rl.cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """What a process of a test gets."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def end(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Return exit code and output; end the process if it hangs."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"it did not end in {timeout_s} s:\n{output}") from None
    return process.returncode, output


def succeed(*arguments: str | Path) -> str:
    """Run the program to a good end; return its output."""
    code, output = end(pdm_rl(*arguments))
    assert code == 0, output
    return output


def lines(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(folder: Path) -> int:
    """Optimizer steps that the metrics know of."""
    return sum(line["kind"] == "step" for line in lines(folder))


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until so many steps are logged; the run must not end before."""
    deadline = time.monotonic() + TIMEOUT_S
    while steps(folder) < count:
        assert process.poll() is None, end(process)[1]
        assert time.monotonic() < deadline, "no steps in time"
        time.sleep(0.01)


def ranks(process: subprocess.Popen[str], module: str = "megatron.rl.rank") -> list[psutil.Process]:
    """The processes of the ranks, in the order of their start."""
    children = psutil.Process(process.pid).children()
    found = [child for child in children if module in child.cmdline()]
    return sorted(found, key=lambda child: child.pid)


def interrupt(
    process: subprocess.Popen[str], folder: Path, at_step: int, signum: signal.Signals
) -> tuple[int, str]:
    """Send a signal once so many steps are logged, and one new one, and wait for the end."""
    wait_for_steps(process, folder, max(at_step, steps(folder) + 1))
    process.send_signal(signum)
    return end(process)


def repeatable(folder: Path, drop: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The metrics that a resumed run repeats exactly."""
    unwanted = (*UNREPEATABLE, *drop)
    return [
        {name: value for name, value in line.items() if not name.startswith(unwanted)}
        for line in lines(folder)
        if line["kind"] != "checkpoint"
    ]


def weights(folder: Path) -> str:
    """Digest of the final policy."""
    return hashlib.sha256((folder / "policy" / "model.safetensors").read_bytes()).hexdigest()


def event_steps(folder: Path, tag: str) -> list[int]:
    """The steps at which TensorBoard has a number, over all files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for path in sorted((folder / "tensorboard").glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            found += [event.step for value in event.summary.value if value.tag == tag]
    return sorted(found)
