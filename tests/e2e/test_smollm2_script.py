# SPDX-License-Identifier: Apache-2.0
"""The example with a real checkpoint, as a user types it: one rollout batch of it, two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "rl" / "smollm2_gsm8k.sh"
TIMEOUT_S = 1200
# Float32 on both sides, before the first update.
PARITY_NATS = 1e-3


def test_one_rollout_batch_and_its_report(tmp_path: Path) -> None:
    settings = ["train.rollouts=1", "eval.prompts=8", "run.export=false"]
    result = subprocess.run(
        ["bash", str(SCRIPT), *(part for one in settings for part in ("--set", one))],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable, "RUN": str(tmp_path / "run")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if "is a package registry within reach?" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if record["kind"] == "step"]
    (rollout,) = [record for record in records if record["kind"] == "rollout"]
    assert len(steps) == 2
    assert steps[0]["mismatch/engine/log_prob_max"] < PARITY_NATS
    assert rollout["bridge/probe_max"] < PARITY_NATS
    assert 0 < rollout["reward"] < 1
    assert rollout["groups_without_signal"] < 1
    # In float32 a rank holds weights, gradients and, of two moments, its half.
    assert rollout["memory/peak_gib"] > 3 * 4 * 134.5e6 / 2**30
    assert f"{steps[0]['mismatch/engine/log_prob_max']:.2e} nats" in result.stdout
    assert f"{rollout['memory/peak_gib']:.2f} GiB" in result.stdout
