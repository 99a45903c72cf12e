# SPDX-License-Identifier: Apache-2.0
"""The flagship recipe from its script to its end, tiny, on CPU: FP8 in training and rollout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launching import FOREIGN, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LIMIT_S = 1500.0  # of a machine that is busy with other things


def test_the_reward_rises_and_the_mismatch_is_that_of_fp8(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    result = subprocess.run(
        ["bash", str(ROOT / "examples/rl/qwen3_30b_fp8_e2e.sh"), "--set", f"run.folder={tmp_path}"],
        env=environment | {"SCALE": "tiny", "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (run,) = tmp_path.iterdir()
    records = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    by_kind = {
        kind: [r for r in records if r["kind"] == kind] for kind in ("step", "rollout", "eval")
    }
    assert (len(by_kind["step"]), len(by_kind["rollout"])) == (80, 10)
    before, after = (by_kind["eval"][i] for i in (0, -1))
    # 0.32 -> 0.70 with 256 prompts each: six standard errors of the difference are 0.25.
    errors = (before["heldout_reward_stderr"] ** 2 + after["heldout_reward_stderr"] ** 2) ** 0.5
    assert after["heldout_reward"] - before["heldout_reward"] > 5 * errors
    # Rounded operands: far above BF16's 1e-4, far below what wrong weights would do.
    assert all(2e-4 < step["mismatch/engine/k3"] < 0.02 for step in by_kind["step"])
    assert any(step["clip_fraction"] > 0 for step in by_kind["step"])
    assert [batch["bridge/version"] for batch in by_kind["rollout"]] == list(range(1, 11))
