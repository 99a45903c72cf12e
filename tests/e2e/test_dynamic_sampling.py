# SPDX-License-Identifier: Apache-2.0
"""A run with dynamic sampling and a reward term, and its replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.rl.rollout.records.record_folder import RecordFolder
from tests.e2e.runs import start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAMPLES = 4
# Responses are penalised from their ninth token on.
SETTINGS = (
    "rollout.refill_rounds=2",
    f"rollout.group_size={SAMPLES}",
    "reward.overlong_buffer_tokens=4",
    "reward.overlong_penalty=0.5",
)
LONGEST = 12


def test_a_refilled_run_trains_on_groups_that_teach_and_replays(
    model: Path, tmp_path: Path
) -> None:
    run = start(tmp_path / "run", model, [*SETTINGS, "records.write=true"])
    code, output = run.wait()
    assert code == 0, output
    folder = RecordFolder(run.run_folder / "rollouts")
    for record, logged in zip(folder.batches(), run.metrics("rollout"), strict=True):
        assert len(record) == SAMPLES * logged["refill/trained_prompts"] > 0
        sampled = logged["refill/sampled_prompts"]
        assert sampled == logged["refill/trained_prompts"] + logged["refill/dropped_groups"] >= 8
        # Scores are 0 or 1: taken back out of the rewards by the formula, written out again.
        lengths = record.rollouts.lengths
        penalty = 0.5 * np.maximum(lengths - (LONGEST - 4), 0) / 4
        scores = record.rewards + penalty
        assert np.isin(scores, (0.0, 1.0)).all()
        by_group = scores.reshape(-1, SAMPLES)
        assert (by_group.max(axis=1) > by_group.min(axis=1)).all(), "equal groups are dropped"
        assert logged["reward"] == pytest.approx(logged["reward/score"] + logged["reward/overlong"])
    steps = run.metrics("step")
    kept = [record.rollouts.num_tokens for record in folder.batches()]
    assert sum(step["tokens"] for step in steps) == sum(kept), "the real counts"

    replayed = start(
        tmp_path / "replay",
        model,
        [
            *SETTINGS,
            "rollout.engine=replay",
            f"rollout.replay_from={folder.folder}",
            "rollout.engines_per_node=2",
        ],
    )
    code, output = replayed.wait()
    assert code == 0, output
    before, after = (
        load_file(r.run_folder / "policy" / "model.safetensors") for r in (run, replayed)
    )
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    timed = ("time/", "tokens_per_s")
    for a, b in zip(steps, replayed.metrics("step"), strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith(timed)
        }
