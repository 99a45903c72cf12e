# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped or killed at any point and resumed is the run that was not."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron.rl.rollout.records.record_folder import RecordFolder
from tests.e2e import resuming
from tests.e2e.resuming import (
    NO_ENGINE,
    end,
    event_steps,
    interrupt,
    pdm_rl,
    ranks,
    repeatable,
    replay_config,
    steps,
    succeed,
    wait_for_steps,
    weights,
    write_config,
)
from tests.e2e.runs import CONFIG, Run

pytestmark = pytest.mark.engine

TERM, KILL = signal.SIGTERM, signal.SIGKILL


def test_a_stop_within_a_batch_changes_nothing(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    """One rank of two is told, between two of a batch's four steps."""
    whole, run = finished[0].run_folder, tmp_path / "run"
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model))
    replayed = f"rollout.replay_from={whole / 'rollouts'}"
    source = ("--set", "rollout.engine=replay", "--set", replayed)
    process = pdm_rl("train", config, "--run-folder", run, *source)
    wait_for_steps(process, run, 1)
    ranks(process)[1].send_signal(TERM)
    code, output = end(process)
    assert code == 0 and "in rollout batch 1" in output, output
    assert 1 <= steps(run) < 4 and (run / "result.json").exists() is False
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert f"continue from {checkpoint.name}: pdm-rl resume {run}" in output
    assert f"continuing from {checkpoint.name}" in succeed("resume", run)
    assert repeatable(run, NO_ENGINE) == repeatable(whole, NO_ENGINE)
    assert weights(run) == weights(whole)
    assert event_steps(run, "step/loss") == list(range(1, 9)), "each once"


@pytest.mark.slow
def test_stops_at_any_step_change_nothing(sampled: Path, model: Path, tmp_path: Path) -> None:
    """In the first batch, in its second pass, at its end; saved or killed."""
    config = replay_config(tmp_path, model, sampled)
    run = tmp_path / "run"
    train = ("train", config, "--run-folder", run)
    for at_step, signum, expected in (
        (3, TERM, 0),
        (6, TERM, 0),
        (10, KILL, -KILL),
        (15, signal.SIGUSR1, 0),
        (21, KILL, -KILL),
    ):
        code, output = interrupt(pdm_rl(*train), run, at_step, signum)
        assert code == expected, output
        assert ("pdm-rl resume" in output) == (code == 0)
        train = ("resume", run)
    output = succeed("resume", run)
    assert re.search(r"continuing from step-0000\d\d", output), output
    assert repeatable(run, NO_ENGINE) == repeatable(sampled, NO_ENGINE)
    assert weights(run) == weights(sampled)
    # Among these metrics: the schedule, whose every step differs, and what the batches held.
    logged = [line for line in resuming.lines(run) if line["kind"] == "step"]
    assert len({line["learning_rate"] for line in logged}) > 25
    assert len({(line["tokens"], line["loss"]) for line in logged}) > 25
    assert event_steps(run, "step/loss") == list(range(1, 33)), "each once"
    assert event_steps(run, "rollout/reward") == [1, 2, 3, 4]
    # Nothing is left to do, however often it is asked to.
    for again in (("resume", run), ("train", config, "--run-folder", run)):
        assert "finished after 4 rollouts" in succeed(*again)
    assert steps(run) == 32
    assert len(list((run / "checkpoints").iterdir())) == 2, "no more than checkpoint.keep"


@pytest.mark.slow
def test_a_real_engine_samples_the_same_again(sampled: Path, model: Path, tmp_path: Path) -> None:
    """Stopped while it samples, in a batch, and killed: the same weights and records."""
    config = write_config(tmp_path / "config.yaml", model, records={"write": True})
    run = tmp_path / "run"
    process = pdm_rl("train", config, "--run-folder", run)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("evaluating"):
            break
    time.sleep(0.2)  # into the sampling
    process.send_signal(TERM)
    code, output = end(process)
    assert code == 0 and "in rollout batch 1" in output, output
    code, output = interrupt(pdm_rl("resume", run), run, 12, TERM)
    assert code == 0, output
    interrupt(pdm_rl("resume", run), run, 19, KILL)
    succeed("resume", run)
    assert repeatable(run) == repeatable(sampled)
    assert weights(run) == weights(sampled)
    ours, theirs = (RecordFolder(folder / "rollouts") for folder in (run, sampled))
    for purpose in ("train", "heldout"):
        assert ours.numbers(purpose) == theirs.numbers(purpose)
        for number in ours.numbers(purpose):
            a, b = (records.batch(purpose, number) for records in (ours, theirs))
            for name in ("prompt_tokens", "prompt_ids", "rewards", "advantages"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
            for name, column in a.rollouts.arrays().items():
                np.testing.assert_array_equal(column, b.rollouts.arrays()[name], name)


@pytest.mark.slow
def test_mismatch_of_every_token_survives(sampled: Path, model: Path, tmp_path: Path) -> None:
    """What the batch's first weights gave cannot be computed again: it is saved."""
    settings = {"mismatch": "every_token", "rollouts": 2}
    whole, run = tmp_path / "whole", tmp_path / "run"
    config = replay_config(tmp_path, model, sampled, train=settings)
    succeed("train", config, "--run-folder", whole)
    code, output = interrupt(pdm_rl("train", config, "--run-folder", run), run, 3, TERM)
    assert code == 0, output
    succeed("resume", run)
    assert repeatable(run) == repeatable(whole)
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_another_layout_goes_on(sampled: Path, model: Path, tmp_path: Path) -> None:
    """From TP2 x PP2 in the middle of a batch to one rank, then to two replicas with an engine
    each and the experts spread over both: the same rollouts, equal up to rounding."""
    small = {"learning_rate": 1.0e-5}
    whole, run = tmp_path / "whole", tmp_path / "run"
    config = replay_config(tmp_path, model, sampled, train=small)
    succeed("train", config, "--run-folder", whole)
    four = ("--set", "parallel={tensor: 2, pipeline: 2, expert: 2}")
    code, output = interrupt(pdm_rl("train", config, "--run-folder", run, *four), run, 10, TERM)
    assert code == 0, output
    one = ("--set", "parallel={tensor: 1, expert: 1}")
    code, output = interrupt(pdm_rl("train", config, "--run-folder", run, *one), run, 18, TERM)
    assert code == 0, output
    two = ("--set", "parallel={tensor: 1, data: 2, expert: 2}")
    engines = ("--set", "rollout.engines_per_node=2")
    succeed("train", config, "--run-folder", run, *two, *engines)
    ours, theirs = resuming.lines(run), resuming.lines(whole)
    for kind, names in {
        "step": ("tokens", "learning_rate", "grad_norm", "entropy", "divergence/mean"),
        "rollout": ("reward", "response_tokens", "optimizer_steps", "policy_version"),
    }.items():
        pairs = [[line for line in part if line["kind"] == kind] for part in (ours, theirs)]
        assert len(pairs[0]) == len(pairs[1]) > 0
        for a, b in zip(*pairs, strict=True):
            for name in names:
                assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-7), (kind, name)


@pytest.mark.slow
def test_a_vanishing_learning_rate_changes_nothing(
    sampled: Path, model: Path, tmp_path: Path
) -> None:
    """Resumed weights are what was saved: the optimizer holds no others. 0 itself is refused."""
    from safetensors.torch import load_file

    config = replay_config(tmp_path, model, sampled, train={"rollouts": 2, "schedule": "constant"})
    run = tmp_path / "run"
    succeed("train", config, "--run-folder", run)
    before = load_file(run / "policy" / "model.safetensors")
    shutil.rmtree(run / "policy")
    still = ("--set", "train.learning_rate=1.0e-30", "--set", "train.rollouts=4")
    assert end(pdm_rl("train", config, "--run-folder", run, *still))[0] == 2
    output = succeed("train", config, "--run-folder", run, *still, "--allow-changed")
    assert "continuing from step-000016" in output
    rates = [line["learning_rate"] for line in resuming.lines(run) if line["kind"] == "step"]
    assert rates[16:] == [1.0e-30] * 16
    after = load_file(run / "policy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((tensor - after[name]).abs().max() < 1e-25 for name, tensor in before.items())


@pytest.mark.slow
def test_what_the_user_is_told(sampled: Path, model: Path, tmp_path: Path) -> None:
    config = replay_config(tmp_path, model, sampled, train={"rollouts": 2})
    run = tmp_path / "run"
    process = pdm_rl("train", config, "--run-folder", run)
    wait_for_steps(process, run, 1)
    under_way = [psutil.Process(process.pid), *ranks(process)]
    for one in under_way:  # longer than the second one waits
        one.suspend()
    code, output = end(pdm_rl("resume", run))
    for one in under_way:
        one.resume()
    assert code == 2 and f"error: a run is under way in {run} (process {process.pid}" in output
    assert end(process)[0] == 0
    code, output = end(pdm_rl("train", config, "--run-folder", run, "--set", "loss.threshold=0.02"))
    assert code == 2
    assert "has loss.threshold 0.01, expected the same, got 0.02" in output
    code, output = end(pdm_rl("train", config, "--run-folder", model))
    assert code == 2 and f"expected an empty folder or a run in {model}" in output
    code, output = end(pdm_rl("resume", tmp_path / "nothing"))
    assert code == 2 and "found no config.yaml" in output
