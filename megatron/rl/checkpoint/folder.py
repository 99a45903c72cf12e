# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints: names, which are complete, which are kept.

    checkpoints/
        step-000120/                    complete: it has a manifest
        step-000120.1/                  saved again at the same step, after a resume
        .step-000140.partial-5f3a…/     being written
        .step-000100.deleting-09c1…/    being deleted

A checkpoint gets its name by one rename, after everything in it is on the disk, and loses it by
one rename before anything in it is deleted. So a process that is killed at any moment leaves
complete checkpoints and folders with a leading dot, which the next run removes.
"""

import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.rl.checkpoint.durable import flush_folder
from megatron.rl.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedCheckpoint,
    Manifest,
    read_manifest,
)

_NAME = re.compile(r"step-(\d{6,})(?:\.(\d+))?")
_LEFTOVER = re.compile(r"\.step-\d{6,}(?:\.\d+)?\.(?:partial|deleting)-[0-9a-f]{32}")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """A checkpoint's place in the order of a run: its step, and how often that was saved before."""

    step: int
    repetition: int = 0

    def __str__(self) -> str:
        suffix = f".{self.repetition}" if self.repetition else ""
        return f"step-{self.step:06d}{suffix}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A checkpoint whose manifest and file sizes are right."""

    name: CheckpointName
    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class RefusedCheckpoint:
    """A folder with a checkpoint's name that is not a complete checkpoint."""

    name: CheckpointName
    path: Path
    reason: str


class CheckpointFolder:
    """The checkpoints of one run. Used by one rank alone, but for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def survey(self) -> tuple[list[CompleteCheckpoint], list[RefusedCheckpoint]]:
        """Return complete checkpoints and refused ones, the newest first.

        Sizes are checked here, digests are not.
        """
        complete: list[CompleteCheckpoint] = []
        refused: list[RefusedCheckpoint] = []
        for name in sorted(self._names(), reverse=True):
            path = self.path / str(name)
            try:
                complete.append(CompleteCheckpoint(name, path, read_manifest(path)))
            except DamagedCheckpoint as error:
                refused.append(RefusedCheckpoint(name, path, str(error)))
        return complete, refused

    def start_partial(self, step: int) -> Path:
        """Make an empty folder beside the checkpoints to write the next one into."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{CheckpointName(step)}.partial-{uuid.uuid4().hex}"
        partial.mkdir()
        return partial

    def publish(self, partial: Path, step: int) -> CheckpointName:
        """Give a written folder, its manifest included, its name; return the name."""
        assert (partial / MANIFEST_NAME).is_file(), "the manifest is what makes it complete"
        flush_folder(partial)
        taken = [name.repetition for name in self._names() if name.step == step]
        name = CheckpointName(step, max(taken) + 1 if taken else 0)
        partial.rename(self.path / str(name))
        flush_folder(self.path)
        return name

    def prune(self, published: CheckpointName, keep: int, keep_best: bool) -> list[Path]:
        """Take the names of old checkpoints away; return the folders that remain to be deleted.

        Kept are the ``keep`` newest up to the one just published, the best by its score, and
        whatever is newer: a run that was resumed from an older checkpoint, because a newer one was
        damaged, deletes nothing that it has not reached again.
        """
        complete, _ = self.survey()
        past = [checkpoint for checkpoint in complete if checkpoint.name <= published]
        kept = {checkpoint.name for checkpoint in past[:keep]}
        if keep_best and (best := best_checkpoint(complete)) is not None:
            kept.add(best.name)
        return [self._unname(old.path) for old in past if old.name not in kept]

    def discard(self, partial: Path) -> None:
        """Delete a folder that will not become a checkpoint, as far as that is possible."""
        shutil.rmtree(partial, ignore_errors=True)

    def remove_leftovers(self) -> int:
        """Delete what a killed process was writing or deleting; return how many folders.

        Only folders with names of this module's making are touched.
        """
        if not self.path.is_dir():
            return 0
        leftovers = [path for path in self.path.iterdir() if _LEFTOVER.fullmatch(path.name)]
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True)
        return len(leftovers)

    def _names(self) -> list[CheckpointName]:
        if not self.path.is_dir():
            return []
        parsed = [CheckpointName.parse(path.name) for path in self.path.iterdir() if path.is_dir()]
        return [name for name in parsed if name is not None]

    def _unname(self, path: Path) -> Path:
        deleting = path.with_name(f".{path.name}.deleting-{uuid.uuid4().hex}")
        path.rename(deleting)
        return deleting


def best_checkpoint(complete: Sequence[CompleteCheckpoint]) -> CompleteCheckpoint | None:
    """Return the one with the highest score, the newest of several; None where none has one."""
    scored = [
        (checkpoint.manifest.score, checkpoint.name, checkpoint)
        for checkpoint in complete
        if checkpoint.manifest.score is not None
    ]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None
