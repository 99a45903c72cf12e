# SPDX-License-Identifier: Apache-2.0
"""Runs that replay the rollouts of another one, and runs with several engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.rl.rollout.records.record_folder import RecordFolder
from tests.e2e.runs import Run, start

pytestmark = pytest.mark.engine

ONE_RANK = ("parallel.tensor=1", "parallel.expert=1")
TWO_REPLICAS = ("parallel.tensor=1", "parallel.expert=1", "parallel.data=2")


def records_of(run: Run) -> Path:
    return run.run_folder / "rollouts"


def replay(folder: Path, model: Path, records: Path, settings: Sequence[str] = ()) -> Run:
    """Replay records to the end."""
    source = ["rollout.engine=replay", f"rollout.replay_from={records}"]
    run = start(folder, model, [*source, *settings])
    code, output = run.wait()
    assert code == 0, output
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.run_folder / "policy" / "model.safetensors")


def untimed(run: Run, kind: str) -> list[dict[str, Any]]:
    """The metrics without those of the clock, of memory, and of there being an engine."""
    return [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("time/", "tokens_per_s", "memory/", "bridge/"))
        }
        for record in run.metrics(kind)
    ]


def test_every_batch_was_recorded(finished: tuple[Run, str]) -> None:
    run = finished[0]
    folder = RecordFolder(records_of(run))
    assert folder.numbers("train") == [1, 2] and folder.numbers("heldout") == [0, 2]
    for record, logged in zip(folder.batches(), run.metrics("rollout"), strict=True):
        assert len(record) == 32 and record.info.samples_per_prompt == 4
        assert record.rollouts.num_tokens == logged["response_tokens"]
        assert record.rewards.mean() == logged["reward"]
        assert set(record.rollouts.policy_versions) == {logged["policy_version"]}
        assert record.info.engine_settings["vllm_version"]
        sums = np.bincount(record.rollouts.prompt_index, weights=record.advantages)
        assert np.abs(sums).max() < 1e-5, "advantages are relative to the group"
    for number, logged in zip((0, 2), run.metrics("eval"), strict=True):
        assert folder.batch("heldout", number).rewards.mean() == logged["heldout_reward"]


def test_a_replay_is_the_recorded_run_bit_for_bit(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    """Two owners where one engine recorded: batches are split anew, and nothing else differs."""
    run = replay(tmp_path, model, records_of(finished[0]), ["rollout.engines_per_node=2"])
    before, after = weights(finished[0]), weights(run)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    for kind in ("step", "rollout", "eval"):
        assert untimed(run, kind) == untimed(finished[0], kind)


@pytest.mark.slow
def test_more_rollouts_than_were_recorded_end_the_replay_with_one_line(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    records = records_of(finished[0])
    source = ["rollout.engine=replay", f"rollout.replay_from={records}"]
    run = start(tmp_path, model, [*source, "train.rollouts=3", *ONE_RANK])
    code, output = run.wait()
    assert code == 2
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "no further train batch (recorded: 2)" in line


@pytest.mark.slow
def test_replicas_and_engines_change_the_result_by_rounding_only(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    """The same rollouts on one rank, and on two that each own an engine and train on a half."""
    records = records_of(finished[0])
    settings = ["train.learning_rate=1.0e-5", "train.epochs=2"]
    one = replay(tmp_path / "one", model, records, [*settings, *ONE_RANK])
    two = replay(
        tmp_path / "two", model, records, [*settings, *TWO_REPLICAS, "rollout.engines_per_node=2"]
    )
    steps = [untimed(run, "step") for run in (one, two)]
    assert len(steps[0]) == len(steps[1]) == 16
    for a, b in zip(*steps, strict=True):
        assert a["tokens"] == b["tokens"]
        for name in ("grad_norm", "entropy", "divergence/mean", "ppo_kl", "mismatch/total/k3"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-7), name
    start_weights, a, b = load_file(model / "model.safetensors"), weights(one), weights(two)
    for name, tensor in a.items():
        assert (tensor - b[name]).abs().max() < 1e-6, name
    moved = max(float((tensor - start_weights[name]).abs().max()) for name, tensor in a.items())
    assert moved > 1e-5, "steps are far larger than the difference"


@pytest.mark.slow
def test_two_engines_and_two_replicas(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    """Two vLLM processes sample half of the prompts each; what they record replays on one."""
    run = start(
        tmp_path / "run",
        model,
        [*TWO_REPLICAS, "rollout.engines_per_node=2", "records.write=true", "rollout.threads=1"],
    )
    code, output = run.wait()
    assert code == 0, output
    assert "rollout engine 1: ready" in output
    assert {path.name for path in (run.run_folder / "logs").glob("engine*")} == {
        "engine0.log",
        "engine1.log",
    }
    assert [record["policy_version"] for record in run.metrics("rollout")] == [0, 1]
    names = sorted(path.name for path in records_of(run).glob("train-*"))
    assert names == [
        f"train-{number:06d}-engine{engine}.parquet" for number in (1, 2) for engine in (0, 1)
    ]
    # The split changes nobody's seed: the same first batch, up to a close race between two tokens.
    ours, theirs = (RecordFolder(records_of(r)).batch("train", 1) for r in (run, finished[0]))
    assert np.array_equal(ours.prompt_tokens, theirs.prompt_tokens)
    same = [
        np.array_equal(ours.rollouts.response(b), theirs.rollouts.response(b))
        for b in range(len(ours))
    ]
    assert np.mean(same) > 0.9
    again = replay(tmp_path / "again", model, records_of(run), TWO_REPLICAS)
    before, after = weights(run), weights(again)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
