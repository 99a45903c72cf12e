# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints there are, which are kept, and that no kill loses the older one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from megatron.rl.checkpoint.folder import CheckpointFolder, CheckpointName, best_checkpoint
from megatron.rl.checkpoint.manifest import MANIFEST_NAME, find_damage
from tests.unit.checkpoint_files import flip_bit, save

KILLS = 40


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def names(folder: CheckpointFolder) -> list[str]:
    return [str(checkpoint.name) for checkpoint in folder.survey()[0]]


def test_no_folder_is_no_checkpoint(folder: CheckpointFolder) -> None:
    assert folder.survey() == ([], [])
    assert folder.remove_leftovers() == 0


def test_newest_first_by_number_not_by_text(folder: CheckpointFolder) -> None:
    for step in (999_999, 7, 1_000_000):
        save(folder, step, keep=9)
    assert names(folder) == ["step-1000000", "step-999999", "step-000007"]


def test_the_same_step_again_takes_another_name(folder: CheckpointFolder) -> None:
    for _ in range(11):
        save(folder, 3, keep=20)
    assert names(folder)[:2] == ["step-000003.10", "step-000003.9"]
    assert names(folder)[-1] == "step-000003"


@pytest.mark.parametrize("text", ["step-12", "step-000012.", ".step-000012", "step-000012-old"])
def test_other_folders_are_no_checkpoints(folder: CheckpointFolder, text: str) -> None:
    assert CheckpointName.parse(text) is None
    (folder.path / text).mkdir(parents=True)
    assert folder.survey() == ([], [])
    folder.remove_leftovers()
    assert (folder.path / text).is_dir(), "not ours to delete"


def test_keeps_the_newest_and_the_best(folder: CheckpointFolder) -> None:
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.9), (5, 0.1), (6, None)):
        save(folder, step, score=score, keep=2, keep_best=True)
    assert names(folder) == ["step-000006", "step-000005", "step-000004"]
    best = best_checkpoint(folder.survey()[0])
    assert best is not None and best.name.step == 4, "the newer of two equals"
    save(folder, 7, keep=2, keep_best=False)
    assert names(folder) == ["step-000007", "step-000006"]
    assert sorted(path.name for path in folder.path.iterdir()) == ["step-000006", "step-000007"]


def test_a_run_that_went_back_deletes_nothing_newer(folder: CheckpointFolder) -> None:
    for step in (1, 2, 3):
        save(folder, step, keep=3)
    flip_bit(folder.path / "step-000003" / "tensors", 0)  # its size is right: it counts until read
    save(folder, 2, keep=1)
    assert names(folder) == ["step-000003", "step-000002.1"]


def test_incomplete_ones_are_refused_with_the_reason(folder: CheckpointFolder) -> None:
    for step in (1, 2, 3, 4):
        save(folder, step, keep=9)
    (folder.path / "step-000002" / "tensors").unlink()
    (folder.path / "step-000003" / MANIFEST_NAME).unlink()
    with (folder.path / "step-000004" / "run.json").open("ab") as file:
        file.write(b"x")
    complete, refused = folder.survey()
    assert [checkpoint.name.step for checkpoint in complete] == [1]
    reasons = {old.name.step: old.reason for old in refused}
    assert "tensors is missing" in reasons[2]
    assert "no manifest.json" in reasons[3]
    assert "run.json has" in reasons[4]


def test_leftovers_are_ours_alone(folder: CheckpointFolder) -> None:
    save(folder, 1)
    partial = folder.start_partial(2)
    (partial / "tensors").write_bytes(b"half")
    foreign = [".step-000002.partial-mine", ".step-000002.backup", "notes", ".hidden"]
    for name in foreign:
        (folder.path / name).mkdir()
    assert folder.remove_leftovers() == 1
    assert not partial.exists()
    assert names(folder) == ["step-000001"]
    assert all((folder.path / name).is_dir() for name in foreign)


def _save_forever(path: str, first: int, ready: multiprocessing.synchronize.Event) -> None:
    folder, step = CheckpointFolder(Path(path)), first
    ready.set()
    while True:
        save(folder, step, keep=1, file_bytes=20_000)
        step += 1


def test_a_kill_at_any_moment_leaves_the_older_one(folder: CheckpointFolder) -> None:
    """With keep=1: there must be a complete one between any two system calls."""
    rng = random.Random(0)
    context = multiprocessing.get_context("fork")
    save(folder, 0)  # the first one pays for what is loaded late
    started = time.perf_counter()
    save(folder, 0)
    duration = time.perf_counter() - started
    last, stopped_at = 0, set()
    for _ in range(KILLS):
        ready = context.Event()
        child = context.Process(target=_save_forever, args=(str(folder.path), last + 1, ready))
        child.start()
        assert ready.wait(30)
        time.sleep(rng.random() * 3 * duration)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        complete, refused = folder.survey()
        assert complete and not refused
        for checkpoint in complete:
            assert find_damage(checkpoint.path, checkpoint.manifest) is None
        newest = complete[0].name.step
        assert newest >= last
        last = newest
        leftovers = [p.name for p in folder.path.iterdir() if p.name.startswith(".")]
        stopped_at |= {name.split(".")[2].split("-")[0] for name in leftovers}
        folder.remove_leftovers()
        assert len(list(folder.path.iterdir())) == len(complete)
    assert last > 0, "never saved anything"
    assert "partial" in stopped_at, "never stopped while writing"
