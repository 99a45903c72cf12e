# SPDX-License-Identifier: Apache-2.0
"""What a run does when something breaks: one line that says what to do next."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.resuming import (
    NO_ENGINE,
    end,
    environment,
    interrupt,
    lines,
    pdm_rl,
    ranks,
    repeatable,
    replay_config,
    succeed,
    wait_for_steps,
    weights,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def errors(output: str) -> list[str]:
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if line.startswith("error: ")]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_gradient_that_is_not_finite(sampled: Path, model: Path, tmp_path: Path) -> None:
    """The step is not taken, nothing of it is saved, and the message says where to go on."""
    config = replay_config(tmp_path, model, sampled, train={"rollouts": 2, "schedule": "constant"})
    run = tmp_path / "run"
    succeed("train", config, "--run-folder", run)
    before = checkpoints(run)
    wild = ("--set", "train.learning_rate=1.0e30", "--set", "train.rollouts=4", "--allow-changed")
    code, output = end(pdm_rl("train", config, "--run-folder", run, *wild))
    assert code == 1
    (line,) = errors(output)
    assert "the gradient is not finite" in line
    assert f"continue from step-000016: pdm-rl resume {run}" in line
    assert checkpoints(run) == before


def test_damaged_checkpoints_are_passed_over(sampled: Path, model: Path, tmp_path: Path) -> None:
    config = replay_config(tmp_path, model, sampled)
    run = tmp_path / "run"
    interrupt(pdm_rl("train", config, "--run-folder", run), run, 27, signal.SIGKILL)
    names = [name for name in checkpoints(run) if name.startswith("step")]
    assert len(names) == 2
    flip(run / "checkpoints" / names[1])
    output = succeed("resume", run)
    assert f"continuing from {names[0]}" in output
    assert f"passed over {names[1]}" in output
    assert repeatable(run, NO_ENGINE) == repeatable(sampled, NO_ENGINE)
    assert weights(run) == weights(sampled)
    for name in checkpoints(run):
        flip(run / "checkpoints" / name)
    code, output = end(pdm_rl("train", config, "--run-folder", run, "--set", "train.rollouts=5"))
    assert code == 2
    assert "none of the checkpoints" in errors(output)[0]


def flip(checkpoint: Path) -> None:
    """Change one bit of its weights."""
    path = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_failed_save_does_not_end_the_run(sampled: Path, model: Path, tmp_path: Path) -> None:
    """The folder is lost while a run trains, and comes back."""
    config = replay_config(tmp_path, model, sampled)
    run = tmp_path / "run"
    process = pdm_rl("train", config, "--run-folder", run)
    wait_for_steps(process, run, 9)
    folder, aside = run / "checkpoints", run / "aside"
    folder.rename(aside)
    folder.write_text("in the way")
    wait_for_steps(process, run, 25)
    folder.unlink()
    aside.rename(folder)
    code, output = end(process)
    assert code == 0, output
    failed = [line for line in output.splitlines() if line.startswith("no checkpoint at step")]
    assert failed and all("training goes on" in line for line in failed)
    saves = [line for line in lines(run) if line["kind"] == "checkpoint"]
    assert saves[-1]["failed"] == 0 and any(save["failed"] for save in saves)
    assert all(save["blocked_s"] > 0 for save in saves if not save["failed"])
    assert weights(run) == weights(sampled)


def test_a_killed_rank_is_named(sampled: Path, model: Path, tmp_path: Path) -> None:
    config = replay_config(tmp_path, model, sampled)
    run = tmp_path / "run"
    process = pdm_rl("train", config, "--run-folder", run)
    wait_for_steps(process, run, 10)
    ranks(process)[1].kill()
    killed_at = time.monotonic()
    code, output = end(process)
    assert code == 1 and time.monotonic() - killed_at < 30
    (line,) = errors(output)
    assert line.startswith("error: rank 1 was killed by signal 9")
    assert f"pdm-rl resume {run}" in line


def test_a_rank_that_hangs_is_named(sampled: Path, model: Path, tmp_path: Path) -> None:
    config = replay_config(tmp_path, model, sampled)
    run = tmp_path / "run"
    limit = ("--set", "parallel.timeout_s=5")
    process = pdm_rl("train", config, "--run-folder", run, *limit)
    wait_for_steps(process, run, 10)
    hanging = ranks(process)[1]
    hanging.suspend()
    code, output = end(process)
    assert code == 1
    (line,) = errors(output)
    assert line.startswith("error: rank 1 hangs"), line
    assert f"pdm-rl resume {run}" in line
    assert not hanging.is_running() or hanging.status() == psutil.STATUS_ZOMBIE


def torchrun(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=1", "-m", "megatron.rl.cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )  # fmt: skip


def test_torchrun_restarts_where_the_run_was(sampled: Path, model: Path, tmp_path: Path) -> None:
    config = replay_config(tmp_path, model, sampled)
    run = tmp_path / "run"
    process = torchrun("train", config, "--run-folder", run)
    wait_for_steps(process, run, 12)
    ranks(process, "megatron.rl.cli")[1].kill()
    code, output = end(process)
    assert code == 0, output
    assert "continuing from step-000008" in output
    assert repeatable(run, NO_ENGINE) == repeatable(sampled, NO_ENGINE)
    assert weights(run) == weights(sampled)
    again = torchrun("train", config, "--run-folder", run)
    code, output = end(again)
    assert code == 0 and "finished after 4 rollouts" in output


def test_torchrun_hands_sigterm_on(sampled: Path, model: Path, tmp_path: Path) -> None:
    """It waits 30 s for the ranks, which save in the middle of a batch."""
    config = replay_config(tmp_path, model, sampled)
    run = tmp_path / "run"
    process = torchrun("train", config, "--run-folder", run)
    _, output = interrupt(process, run, 12, signal.SIGTERM)
    assert "stopped after" in output and f"pdm-rl resume {run}" in output
    output = succeed("resume", run)
    assert "continuing from step-00001" in output
    assert weights(run) == weights(sampled)
