# SPDX-License-Identifier: Apache-2.0
"""tools/report_run.py on metrics whose totals are worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.report_run import main

STEPS = [
    {
        "tokens": 100,
        "vetoed_tokens": 0,
        "outside_fraction": 0.0,
        "mismatch/engine/log_prob_mean": 2e-6,
        "mismatch/engine/log_prob_max": 3e-5,
        "mismatch/total/log_prob_max": 3e-5,
    },
    {
        "tokens": 300,
        "vetoed_tokens": 6,
        "outside_fraction": 0.04,
        "mismatch/total/log_prob_max": 0.25,
    },
]
ROLLOUT = {
    "optimizer_steps": 2,
    "time/train_s": 30.0,
    "time/total_s": 50.0,
    "bridge/probe_max": 4e-5,
    "memory/peak_gib": 3.5,
    "reward": 0.25,
    "groups_without_signal": 0.5,
    "truncated": 0.125,
    "clip_fraction": 0.015,
}
EVALS = [
    {"heldout_reward": 0.25, "heldout_reward_stderr": 0.05},
    {"heldout_reward": 0.5, "heldout_reward_stderr": 0.06},
]


def write(folder: Path, **kinds: list[dict[str, Any]]) -> None:
    lines = [
        json.dumps({"kind": kind, "number": number} | record)
        for kind, records in kinds.items()
        for number, record in enumerate(records, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [line.strip().split("  ", 1) for line in lines]
    return {part[0]: part[1].strip() for part in parts if len(part) == 2}


def test_totals_are_those_of_all_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = ROLLOUT | {"reward": 0.75, "time/train_s": 10.0, "memory/peak_gib": 3.75}
    write(tmp_path, step=STEPS, rollout=[ROLLOUT, second], eval=EVALS)
    shown = rows(tmp_path, capsys)
    assert shown["|log pi - log mu|, max"] == "3.00e-05 nats"
    assert shown["over response tokens"] == "100"
    assert shown["optimizer steps, tokens"] == "2, 400"
    assert shown["vetoed tokens"] == "6 (1.50 %)"
    assert shown["outside the trust region"] == "3.00 %"  # 0.04 x 300 of 400
    assert shown["engine mismatch, max"] == "3.00e-05 nats"
    assert shown["total mismatch, max"] == "2.50e-01 nats"
    assert shown["step, s"] == "10.0 (from 5.0 to 15.0)"
    assert shown["peak memory of a rank"] == "3.75 GiB"
    assert shown["reward by rollout batch"] == "0.250 0.750"
    assert shown["held-out reward"] == "0.250 +- 0.050 -> 0.500 +- 0.060"


def test_what_a_run_did_not_measure_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = {name: ROLLOUT[name] for name in ROLLOUT if name != "bridge/probe_max"}
    write(tmp_path, step=STEPS, rollout=[rollout | {"memory/peak_gib": None}])
    shown = rows(tmp_path, capsys)
    assert shown["probe after updates, max"] == "not measured"
    assert shown["peak memory of a rank"] == "not measured"
    assert "held-out reward" not in shown


@pytest.mark.parametrize("content", [None, {"eval": EVALS}])
def test_a_folder_without_steps_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any] | None
) -> None:
    if content is not None:
        write(tmp_path, **content)
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "metrics.jsonl" in said
