# SPDX-License-Identifier: Apache-2.0
"""The example scripts of Megatron's own loop, as a user types them, with a real engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.checkpoints import QWEN3_30B
from tests.e2e.test_megatron_training import run_flags
from tests.megatron_flags import layout_flags

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "rl"


def run_script(name: str, *further: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable} | variables
    return subprocess.run(
        ["bash", str(EXAMPLES / name), *further],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def tiny(model: Path, folder: Path, *further: str) -> subprocess.CompletedProcess[str]:
    # Rewards that differ between responses of a model that has learnt nothing yet.
    task = ["--pdm-task-name", "tests.e2e.parity_task:ParityTask", "--pdm-task-params", "{}"]
    task += ["--pdm-task-exact", "false", "--pdm-threshold", "0.001"]
    settings = [*task, "--pdm-run-folder", str(folder / "runs"), *further]
    return run_script(
        "megatron_args_tiny.sh", *settings, MODEL=str(model), SAVE=str(folder / "saved")
    )


def metrics_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    (run,) = (folder / "runs").iterdir()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def assert_engine_gone(output: str, within_s: float = 15.0) -> None:
    """The engine's process has ended, or is about to: it follows a rank that torchrun ended."""
    (process,) = re.findall(r"rollout engine: started process (\d+)", output)
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(int(process)):
        assert time.monotonic() < deadline, "the engine is still running"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_tiny_script_trains_saves_and_resumes(model: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    profile = ["--rl-profile", "--rl-profile-dir", str(whole / "profile")]
    result = tiny(model, whole, *profile)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_engine_gone(result.stdout)
    steps = metrics_of(whole, "step")
    assert [step["number"] for step in steps] == list(range(1, 9))
    # The first step on a batch sees the weights that sampled it: every update has arrived.
    assert all(abs(step["ppo_kl"]) < 1e-6 for step in (steps[0], steps[4]))
    assert any(step["clip_fraction"] > 0 for step in steps)
    rollouts = metrics_of(whole, "rollout")
    assert [batch["policy_version"] for batch in rollouts] == [0, 1]
    assert [batch["bridge/version"] for batch in rollouts] == [1, 2]
    assert all(batch["bridge/probe_mean"] < 1e-3 for batch in rollouts)
    assert all(batch["bridge/digests_compared"] > 0 for batch in rollouts)
    rewards = [record["heldout_reward"] for record in metrics_of(whole, "eval")]
    assert [r for r in re.findall(r"held-out reward: (\S+)", result.stdout)] == [
        f"{reward:.6E}" for reward in (rewards[0], rewards[1], rewards[1])
    ]
    _check_tensorboard(whole / "saved" / "tensorboard", rewards)
    _check_profile(whole / "profile")

    (whole / "saved" / "latest_checkpointed_iteration.txt").write_text("4")
    result = tiny(model, rest, "--load", str(whole / "saved"))
    assert result.returncode == 0, result.stderr[-3000:]
    resumed = metrics_of(rest, "step")
    assert [step["number"] for step in resumed] == [5, 6, 7, 8]
    for step, other in zip(steps[4:], resumed, strict=True):
        assert other["tokens"] == step["tokens"]
        assert other["loss"] == pytest.approx(step["loss"], abs=1e-4)


def _check_tensorboard(folder: Path, rewards: list[float]) -> None:
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = {scalar.step: scalar.value for scalar in events.Scalars("rl/eval/heldout_reward")}
    assert logged == pytest.approx({4: rewards[0], 8: rewards[1]})
    assert [scalar.step for scalar in events.Scalars("rl/step/clip_fraction")] == list(range(1, 9))
    assert [scalar.step for scalar in events.Scalars("rl-profile/rl/rollout_ms")] == list(
        range(1, 9)
    )


def _check_profile(folder: Path) -> None:
    (path,) = folder.iterdir()
    *intervals, total = map(json.loads, path.read_text().splitlines())
    assert [record["iteration"] for record in intervals] == list(range(1, 9))
    for record in intervals:
        assert 0 <= sum(record["phases_ms"].values()) <= record["elapsed_ms"] * 2
        assert (record["phases_ms"]["rl/rollout"] > 1) == (record["iteration"] in (1, 5))
        assert record["phases_ms"]["rl/packing"] > 0
    for name, milliseconds in total["phases_ms"].items():
        assert milliseconds == pytest.approx(sum(r["phases_ms"][name] for r in intervals))
        assert milliseconds > 0, name


@pytest.mark.slow
def test_an_error_in_training_ends_the_engine(model: Path, tmp_path: Path) -> None:
    flags = [*run_flags(model), *layout_flags({"tensor": 2, "expert": 2})]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(ROOT / "tests" / "e2e" / "failing_training.py")),
            *flags,
            *("--micro-batch-size", "8", "--pdm-run-folder", str(tmp_path)),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert "this forward pass always fails" in result.stderr
    assert_engine_gone(result.stdout)


def test_what_a_megatron_user_types_for_qwen3_30b_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    script = "megatron_args_qwen3_30b.sh"
    result = run_script(script, "--dry-run", MODEL=str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "# 32 trainer ranks on cuda: tensor 4 x pipeline 1 x context 1 x data 8" in result.stdout
    assert "# 8 engine(s), vllm, bfloat16 precision" in result.stdout
    assert "minibatch_prompts: 16" in result.stdout and "rollouts: 400" in result.stdout
    assert "quantization: block_fp8" in result.stdout and "transport: cuda_ipc" in result.stdout


@pytest.mark.parametrize(("fp8", "flags"), [("rollout", False), ("e2e", True)])
def test_fp8_in_training_is_three_flags(fp8: str, flags: bool) -> None:
    result = run_script("megatron_args_qwen3_30b.sh", "--dry-run", MODEL="/no/where", FP8=fp8)
    assert result.returncode == 0, result.stderr
    words = "--fp8-format e4m3 --fp8-recipe blockwise --moe-router-padding-for-quantization"
    assert (words in result.stdout) == flags


def test_an_argument_that_is_not_the_model_s_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | {"rope_theta": 10000.0}))
    result = run_script("megatron_args_qwen3_30b.sh", "--dry-run", MODEL=str(tmp_path), NODES="2")
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "--rotary-base: the arguments make rotary_base 1000000, expected 10000" in line
