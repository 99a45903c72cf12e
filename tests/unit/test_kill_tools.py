# SPDX-License-Identifier: Apache-2.0
"""tools/chaos.py: it sees what a process is at, waits for its moments, and finds differences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tools.kills import stacks
from tools.kills.moments import AIMS, Durations, Watch, choose
from tools.kills.outcome import differences, inspect
from tools.kills.parity_task import ParityTask

ROOT = Path(__file__).parents[2]
# Functions named as the training loop's, in files named as its files.
TRAINER = """import threading, time
from checkpoint import writer

def _take_step():
    print("there", flush=True)
    time.sleep(60)

def _train(saving):
    if saving:
        threading.Thread(target=writer.do, daemon=True).start()
        time.sleep(0.2)
    _take_step()
"""
WRITER = """import time
def do():
    time.sleep(60)
"""


@pytest.mark.parametrize("saving", [False, True])
def test_a_process_tells_what_it_is_at(tmp_path: Path, saving: bool) -> None:
    for name, text in (("rl/trainer", TRAINER), ("checkpoint/writer", WRITER)):
        path = tmp_path / "code" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    site = stacks.site_folder(tmp_path / "site")
    places = [str(site), str(tmp_path / "code"), str(ROOT)]
    process = subprocess.Popen(
        [sys.executable, "-c", f"from rl import trainer; trainer._train({saving})"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(places), stacks.FOLDER_VARIABLE: str(dumps)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        expected = stacks.Activity("optimizer step", saving)
        for _ in range(2):  # and lives on
            assert stacks.ask(psutil.Process(process.pid), dumps) == expected
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_not_begun_is_starting(tmp_path: Path) -> None:
    assert stacks.ask(psutil.Process(), tmp_path) == stacks.Activity("start-up")


def record(kind: str, number: int, **metrics: Any) -> str:
    return json.dumps({"kind": kind, "number": number} | metrics) + "\n"


def test_signs_are_counted_once_and_after_a_cut(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True)
    metrics = run / "metrics.jsonl"
    metrics.write_text(record("step", 1) + record("step", 2) + record("step", 3))
    (checkpoints / "step-000002").mkdir()
    watch = Watch(run, output, steps_per_batch=2, durations=Durations())
    watch.look()
    assert not +watch.seen, "what was there before counts for nothing"
    metrics.write_text(record("step", 1) + record("step", 2))  # a resumed run cuts
    watch.look()
    half = record("step", 4)
    with metrics.open("a") as file:
        file.write(record("step", 3) + half[:9])
        file.flush()
        watch.look()
        assert watch.seen["step"] == 1 and watch.seen["trained"] == 0
        file.write(half[9:])
    (checkpoints / ".step-000004.partial-0").mkdir()
    output.write_text("evaluating 16 held-out prompts\n")
    watch.look()
    (checkpoints / ".step-000004.partial-0").rename(checkpoints / "step-000004")
    watch.look()
    assert dict(+watch.seen) == {
        "step": 2, "trained": 1, "saving": 1, "saved": 1, "evaluating": 1
    }  # fmt: skip


def test_moments_are_drawn_by_the_seed_and_reach_every_aim() -> None:
    drawn = [choose(np.random.default_rng([seed])) for seed in range(300)]
    assert drawn == [choose(np.random.default_rng([seed])) for seed in range(300)]
    assert {aim.name for aim, _, _ in drawn} == {aim.name for aim in AIMS}
    assert all(1 <= count <= aim.most and 0 <= share < 1 for aim, count, share in drawn)


def finished_run(folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "policy").mkdir()
    (folder / "policy" / "model.safetensors").write_bytes(b"weights")
    (folder / "result.json").write_text("{}")
    lines = [
        record("step", 1, loss=0.5, **{"time/train_s": os.urandom(1)[0]}),
        record("checkpoint", 1, write_s=os.urandom(1)[0]),
        record("step", 2, loss=0.25),
    ]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_what_may_not_differ_is_found(tmp_path: Path) -> None:
    reference = finished_run(tmp_path / "reference")
    run = finished_run(tmp_path / "run")
    assert differences(run, reference) == []
    assert inspect(run).steps == 2
    (run / "policy" / "model.safetensors").write_bytes(b"weightS")
    (run / "checkpoints" / ".step-000002.partial-0").mkdir()
    (run / "checkpoints" / "step-000002").mkdir()
    (run / "result.json").unlink()
    (run / "metrics.jsonl").write_text(record("step", 1, loss=0.5) + record("step", 2, loss=0.2))
    found = "\n".join(differences(run, reference))
    for expected in (
        "policy/model.safetensors differs",
        "step 2: loss 0.2 instead of 0.25",
        "left in checkpoints: .step-000002.partial-0",
        "no result.json",
        "step-000002: ",
    ):
        assert expected in found
    (run / "metrics.jsonl").write_text(record("step", 1, loss=0.5))
    assert "1 lines instead of 2" in "\n".join(differences(run, reference))


def test_the_task_repeats_its_prompts_and_keeps_the_splits_apart() -> None:
    task = ParityTask()
    train = [task.prompt("train", 3, index).text for index in range(200)]
    assert train == [task.prompt("train", 3, index).text for index in range(200)]
    assert not set(train) & {task.prompt("heldout", 3, index).text for index in range(200)}
    prompt = task.prompt("train", 0, 0)
    assert task.reward("bb", prompt) == 1.0 and task.reward("ab", prompt) == 0.0
