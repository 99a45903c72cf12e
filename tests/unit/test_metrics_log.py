# SPDX-License-Identifier: Apache-2.0
"""A log that is cut where a checkpoint was, and that outlives a full disk."""

import json
from pathlib import Path

import pytest

from megatron.rl.metrics_log import LogPosition, MetricsLog
from tests.e2e.resuming import event_steps


def numbers(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["number"] for line in lines]


def test_what_follows_the_position_is_cut_off(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for number in (1, 2):
            log.write("step", number, {"loss": 0.5})
    with MetricsLog(tmp_path) as log:
        log.write("step", 99, {"loss": 1.0})
    assert numbers(tmp_path) == [99], "without a position it starts anew"
    assert event_steps(tmp_path, "step/loss") == [99]


def test_a_resumed_log_has_every_number_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for number in (1, 2):
            log.write("step", number, {"loss": 0.5})
        position = log.position()
        for number in (3, 4):
            log.write("step", number, {"loss": 0.5})
    for _ in range(2):  # from the same checkpoint twice
        with MetricsLog(tmp_path, position) as log:
            assert log.position().metrics_bytes == position.metrics_bytes
            for number in (3, 4, 5):
                log.write("step", number, {"loss": 0.5})
    assert numbers(tmp_path) == [1, 2, 3, 4, 5]
    assert event_steps(tmp_path, "step/loss") == [1, 2, 3, 4, 5]


def test_a_log_that_is_shorter_than_it_was_goes_on(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("step", 1, {})
        length = log.position().metrics_bytes
    notes: list[str] = []
    with MetricsLog(tmp_path, LogPosition(length + 100), notes.append) as log:
        log.write("step", 2, {})
    assert numbers(tmp_path) == [1, 2]
    assert len(notes) == 1 and "has lost its last lines" in notes[0]


def test_a_full_disk_loses_no_line(tmp_path: Path) -> None:
    """/dev/full has room for nothing."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    notes: list[str] = []
    with MetricsLog(tmp_path, note=notes.append) as log:
        for number in (1, 2):
            log.write("step", number, {"loss": 0.5})
        with pytest.raises(OSError, match="No space left"):
            log.position()
        assert len(notes) == 1 and "training goes on" in notes[0]
        make_room(log, tmp_path)
        log.write("step", 3, {"loss": 0.5})
        assert len(notes) == 2 and "nothing is missing" in notes[1]
        assert log.position().metrics_bytes == (tmp_path / "metrics.jsonl").stat().st_size
    assert numbers(tmp_path) == [1, 2, 3]


def make_room(log: MetricsLog, folder: Path) -> None:
    """Have the log write to a real file from now on."""
    import os

    (folder / "metrics.jsonl").unlink()
    real = os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_CREAT)
    os.dup2(real, log._file)
    os.close(real)
