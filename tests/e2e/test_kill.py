# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random moments, each followed by a resume: the run ends as if nothing had happened.

A short form of tools/chaos.sh, whose longer ones are in docs/checkpoints.md.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.resuming import ROOT, environment
from tests.e2e.runs import CONFIG, Run

pytestmark = pytest.mark.engine


def chaos(folder: Path, *arguments: str | Path) -> tuple[str, list[dict[str, Any]]]:
    """Kill and resume; return what it prints and what it notes of kills and finished runs."""
    command = ["bash", ROOT / "tools" / "chaos.sh", "--folder", folder, *arguments]
    ended = subprocess.run(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout
    lines = (folder / "kills.jsonl").read_text().splitlines()
    return ended.stdout, [json.loads(line) for line in lines]


def test_kills_at_random_moments_change_nothing(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    """Ranks that are forked and replay a recorded run."""
    config = tmp_path / "config.yaml"
    config.write_text(
        CONFIG.format(folder=tmp_path / "runs", model=model) + "checkpoint: {every: 1}\n"
    )
    records = finished[0].run_folder / "rollouts"
    arguments = ("--config", config, "--records", records, "--kills", "4", "--seed", "8")
    output, notes = chaos(tmp_path / "chaos", *arguments)
    kills = [note for note in notes if note["kind"] == "kill"]
    runs = [note for note in notes if note["kind"] == "finished"]
    assert len(kills) == 4 and runs and not any(note["faults"] for note in notes), output
    assert all(kill["steps"] - kill["saved"] <= 8 for kill in kills)


@pytest.mark.slow
def test_kills_of_a_run_with_an_engine_change_nothing(model: Path, tmp_path: Path) -> None:
    """The launcher, ranks, or all at once; while the engine samples and takes weights, too."""
    arguments = ("--engine", "vllm", "--ranks", "2", "--rollouts", "2", "--kills", "4")
    output, notes = chaos(tmp_path, *arguments, "--model", model)
    assert sum(note["kind"] == "kill" for note in notes) == 4
    assert not any(note["faults"] for note in notes), output
