# SPDX-License-Identifier: Apache-2.0
"""The records of a run: every rollout batch in ``<run folder>/rollouts``, a file an engine.

``train-000001-engine0.parquet`` is what engine 0 contributed to rollout batch 1, and
``heldout-000000-engine0.parquet`` its part of the evaluation before any training; record_file.py
has their columns. Owners of engines write them; replay and the analysis read them::

    for record in RecordFolder("runs/.../rollouts").batches("train"):
        ids, log_probs = record.rollouts.topk.decode()
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.rl.errors import UserError
from megatron.rl.rollout.records.record import Purpose, Record, RecordInfo
from megatron.rl.rollout.records.record_file import (
    count_rows,
    read_info,
    read_prompt_ids,
    read_record,
    write_record,
)

RECORDS_FOLDER = "rollouts"

_NAME = re.compile(r"(train|heldout)-(\d+)-engine(\d+)\.parquet")


def record_name(info: RecordInfo) -> str:
    """The name of a record's file."""
    return f"{info.purpose}-{info.number:06d}-engine{info.engine}.parquet"


class RecordWriter:
    """Writes one owner's files and removes its old ones. Close it: the last one may be under way.

    Args:
        folder: made when the first record is written.
        keep: batches of each purpose to keep, the newest; 0 keeps all.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="records")
        self._writing: Future[Path] | None = None

    def write_later(self, record: Record) -> None:
        """Write a record in the background, while the policy trains.

        Raises:
            UserError: the record before this one could not be written.
        """
        self._wait()
        self._writing = self._thread.submit(self.write, record)

    def forget(self, engine: int, engines: int, *, trained: int, evaluated: int) -> None:
        """Remove what a run before this one has written of batches that this one makes again.

        Args:
            engine, engines: of this owner, and how many there are now; the first owner removes
                what engines have written that there are no more.
            trained: the last training batch that stays.
            evaluated: the last held-out batch that stays; -1 for none.
        """
        last = {"train": trained, "heldout": evaluated}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match is None or int(match[2]) <= last[match[1]]:
                continue
            if int(match[3]) == engine or (engine == 0 and int(match[3]) >= engines):
                path.unlink()

    def close(self) -> None:
        """Wait for what is being written; raise UserError when it could not be."""
        self._thread.shutdown()
        self._wait()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def write(self, record: Record) -> Path:
        """Write a record under the name that its info gives it, whole or not at all.

        Raises:
            UserError: the disk is full, or the folder cannot be written to.
        """
        info = record.info
        path = self._folder / record_name(info)
        partial = path.with_name(f".{path.name}.partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                write_record(partial, record)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            self._remove_old(info)
        except OSError as error:
            raise UserError(
                f"rollout record {path} cannot be written ({error}): free some space, keep fewer "
                "batches (records.keep), or set records.write to false"
            ) from None
        return path

    def _remove_old(self, info: RecordInfo) -> None:
        if not self._keep:
            return
        # Every owner does so after the same batches, which leaves whole batches.
        mine = sorted(
            (int(match[2]), path)
            for path in self._folder.iterdir()
            if (match := _NAME.fullmatch(path.name))
            and (match[1], int(match[3])) == (info.purpose, info.engine)
        )
        for _, path in mine[: -self._keep]:
            path.unlink()


class RecordFolder:
    """The recorded batches of a run."""

    def __init__(self, folder: str | Path) -> None:
        """List the files; nothing is read yet.

        Raises:
            UserError: no such folder, or no records in it.
        """
        self.folder = Path(folder)
        self._files: dict[tuple[str, int], dict[int, Path]] = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if match := _NAME.fullmatch(path.name):
                self._files.setdefault((match[1], int(match[2])), {})[int(match[3])] = path
        if not self._files:
            raise UserError(
                f"no rollout records in {self.folder}: expected files such as "
                "train-000001-engine0.parquet, which a run with records.write puts into the "
                f"folder {RECORDS_FOLDER} of its run folder"
            )

    def numbers(self, purpose: Purpose = "train") -> list[int]:
        """Numbers of the recorded batches, ascending."""
        return sorted(number for kind, number in self._files if kind == purpose)

    def info(self, purpose: Purpose, number: int) -> RecordInfo:
        """What the sequences of a batch share."""
        return self._parts(purpose, number)[0][1]

    def batch(self, purpose: Purpose, number: int) -> Record:
        """A whole batch, joined over the engines.

        Raises:
            UserError: no such batch, or a file of it is missing, foreign or damaged.
        """
        return self.sequences(purpose, number, 0, self.info(purpose, number).batch_sequences)

    def sequences(self, purpose: Purpose, number: int, start: int, stop: int) -> Record:
        """The sequences ``[start, stop)`` of a batch, from the files that hold them.

        Raises:
            UserError: as :meth:`batch`, or there are not so many.
        """
        parts = self._parts(purpose, number)
        total = parts[0][1].batch_sequences
        if not 0 <= start <= stop <= total:
            raise UserError(
                f"{self.folder}: {purpose} batch {number} has {total} sequences, asked for "
                f"{start} to {stop}"
            )
        chosen = []
        for path, info in parts:
            first = info.first_sequence
            low, high = max(start, first), min(stop, first + count_rows(path))
            if low < high:
                chosen.append(read_record(path).rows(low - first, high - first))
        return Record.join(chosen) if chosen else read_record(parts[0][0]).rows(0, 0)

    def prompt_ids(self, purpose: Purpose, number: int) -> NDArray[np.int64]:
        """The ids of a batch's prompts, one a group.

        Raises:
            UserError: as :meth:`batch`.
        """
        parts = self._parts(purpose, number)
        ids = np.concatenate([read_prompt_ids(path) for path, _ in parts])
        return ids[: parts[0][1].batch_sequences : parts[0][1].samples_per_prompt]

    def batches(self, purpose: Purpose = "train") -> Iterator[Record]:
        """Every recorded batch, in order."""
        for number in self.numbers(purpose):
            yield self.batch(purpose, number)

    def _parts(self, purpose: Purpose, number: int) -> list[tuple[Path, RecordInfo]]:
        """The files of a batch in the order of their sequences, which they cover."""
        files = self._files.get((purpose, number), {})
        if not files:
            raise UserError(f"{self.folder} has no {purpose} batch {number}")
        found = [(path, read_info(path)) for _, path in sorted(files.items())]
        total = found[0][1].batch_sequences
        parts: list[tuple[Path, RecordInfo]] = []
        reached = 0
        for path, info in found:
            # Behind the last sequence: left by a run that went on with fewer engines.
            if (parts and reached == total) or info.first_sequence != reached:
                break
            if parts and _row_shape(info) != _row_shape(parts[0][1]):
                raise UserError(
                    f"{path} is not of the same batch as {parts[0][0].name}: their groups, top-K "
                    "entries or vocabularies differ"
                )
            parts.append((path, info))
            reached += count_rows(path)
        if reached != total:
            raise UserError(
                f"{self.folder}: {purpose} batch {number} has {total} sequences, but the files "
                f"that are there hold none from sequence {reached} on; one of them is missing"
            )
        return parts


def _row_shape(info: RecordInfo) -> tuple[int, ...]:
    """What the parts of a batch have to agree on to be joined."""
    return (
        info.batch_sequences,
        info.samples_per_prompt,
        info.vocab_size,
        info.settings.top_logprobs,
    )
