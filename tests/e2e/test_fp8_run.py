# SPDX-License-Identifier: Apache-2.0
"""FP8 end to end on CPU: emulated in training, block FP8 weights in the engine, on two ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Run, start
from tools.make_tiny_model import TinyModelSettings, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# One head and one group a rank, 128 wide, and experts of 128: whole blocks everywhere.
WHOLE_BLOCKS: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 128, "expert_size": 128}
FP8 = ["model.fp8=blockwise", "bridge.quantization=block_fp8"]
NOTE = "trainer and engine round them in different blocks"


def run(tmp_path: Path, shape: dict[str, Any], overrides: list[str]) -> tuple[Run, str]:
    model = tmp_path / "model"
    make_tiny_model(model, TinyModelSettings(steps=0, **shape), say=lambda text: None)
    runs = tmp_path / "runs"
    runs.mkdir()
    started = start(runs, model, ["train.rollouts=1", *overrides])
    code, output = started.wait(600)
    assert code == 0, output
    return started, output


@pytest.mark.parametrize(
    ("shape", "differs"),
    [
        pytest.param(WHOLE_BLOCKS, None, id="whole blocks"),
        pytest.param({}, "down_proj|gate_proj|k_proj|o_proj|q_proj|up_proj|v_proj", id="ragged"),
    ],
)
def test_mismatch_is_reported_and_training_goes_on(
    tmp_path: Path, shape: dict[str, Any], differs: str | None
) -> None:
    finished, output = run(tmp_path, shape, FP8)
    assert (NOTE in output) == (differs is not None)
    steps = finished.metrics("step")
    assert len(steps) == 4
    first = steps[0]
    # FP8 moves log-probs far more than float32 rounding (5e-7), and far less than wrong weights.
    assert 1e-4 < first["mismatch/engine/log_prob_max"] < 1.0
    assert 0 < first["mismatch/engine/k3"] < 0.05
    assert 0 < first["mismatch/engine/prob_max"] < 1
    assert math.isfinite(first["mismatch/engine/kl"])
    assert all(math.isfinite(step["grad_norm"]) and step["grad_norm"] > 0 for step in steps)
