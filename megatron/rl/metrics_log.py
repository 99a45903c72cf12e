# SPDX-License-Identifier: Apache-2.0
"""Metrics as lines of ``metrics.jsonl`` and in TensorBoard, which a resumed run continues."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_EVENT_FILES = "events.out.tfevents.*"


@dataclass(frozen=True)
class LogPosition:
    """How long the files were at some point of a run.

    metrics_bytes: of metrics.jsonl. event_bytes: of TensorBoard's files, by name.
    """

    metrics_bytes: int = 0
    event_bytes: Mapping[str, int] = field(default_factory=dict)


class MetricsLog:
    """Appends metrics to both; use as a context manager.

    A line that the disk has no room for is kept and written before the next one: a full disk stops
    no run. TensorBoard gives up for good when it cannot be written; it shows what is in the file.

    Args:
        position: where the log continues; what was written behind it is cut off.
        note: is told what a user may want to know.
    """

    def __init__(
        self,
        folder: Path,
        position: LogPosition | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._note = note
        self._path = folder / METRICS_NAME
        self._events = folder / TENSORBOARD_FOLDER
        position = position or LogPosition()
        _cut_events(self._events, position.event_bytes)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._length = _cut(self._file, position.metrics_bytes)
        if self._length < position.metrics_bytes:
            note(f"{self._path} has lost its last lines; it continues where it ends")
        self._unwritten: list[bytes] = []
        self._writer: SummaryWriter | None = SummaryWriter(str(self._events))

    def write(self, kind: str, number: int, metrics: dict[str, Any]) -> None:
        """Log one record; ``number`` counts optimizer steps or rollout batches, by its kind.

        JSON has neither NaN nor infinity: such a metric becomes null, and ``non_finite`` names it.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        non_finite = [name for name, value in numbers.items() if not math.isfinite(value)]
        record = {"kind": kind, "number": number} | metrics | dict.fromkeys(non_finite)
        if non_finite:
            record["non_finite"] = non_finite
        self._unwritten.append((json.dumps(record, allow_nan=False) + "\n").encode())
        self._write_lines()
        finite = {name: value for name, value in numbers.items() if name not in non_finite}
        self._draw(kind, number, finite)

    def position(self) -> LogPosition:
        """Return how long the files are, once all of it is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        if self._unwritten and (error := self._append()) is not None:
            raise error
        os.fsync(self._file)
        if self._writer is not None:
            self._writer.flush()
        sizes = {path.name: path.stat().st_size for path in self._events.glob(_EVENT_FILES)}
        return LogPosition(self._length, sizes)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._unwritten and (failure := self._append()) is not None:
            self._note(f"{len(self._unwritten)} lines of {self._path} were not written: {failure}")
        os.close(self._file)
        if self._writer is not None:
            self._writer.close()

    def _write_lines(self) -> None:
        behind = len(self._unwritten) > 1
        error = self._append()
        if error is not None and not behind:
            self._note(
                f"{self._path} cannot be written, training goes on: {error}; its lines are kept "
                "and written when there is room"
            )
        if error is None and behind:
            self._note(f"{self._path} is written again, nothing is missing")

    def _append(self) -> OSError | None:
        """Write what is left to write, in whole lines; return why that is not possible."""
        while self._unwritten:
            line, done = self._unwritten[0], 0
            try:
                while done < len(line):
                    done += os.pwrite(self._file, line[done:], self._length + done)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._length)  # no part of a line
                return error
            self._length += len(line)
            del self._unwritten[0]
        return None

    def _draw(self, kind: str, number: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in numbers.items():
                self._writer.add_scalar(f"{kind}/{name}", value, number)
        except OSError as error:
            self._writer = None
            self._note(f"TensorBoard's files in {self._events} end here: {error}")


def _cut(descriptor: int, length: int) -> int:
    """Cut an open file to at most ``length`` bytes and return its length then."""
    size = os.fstat(descriptor).st_size
    if size > length:
        os.ftruncate(descriptor, length)
    return min(size, length)


def _cut_events(folder: Path, lengths: Mapping[str, int]) -> None:
    """Cut event files to their lengths, and remove those that were not there then."""
    for path in folder.glob(_EVENT_FILES):
        if path.name in lengths:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                _cut(descriptor, lengths[path.name])
            finally:
                os.close(descriptor)
        else:
            path.unlink()
