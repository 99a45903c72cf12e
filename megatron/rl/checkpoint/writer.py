# SPDX-License-Identifier: Apache-2.0
"""Saves the run, so that it can be continued from there by other ranks in another layout."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.storage import WriteResult

from megatron.rl.checkpoint.agreement import (
    RankFailed,
    all_ranks,
    first_failure,
    from_rank_0,
    on_all_ranks,
)
from megatron.rl.checkpoint.durable import flush_file, flush_folder, write_flushed
from megatron.rl.checkpoint.file_names import (
    EXTRA_FOLDER,
    FORMAT_NAME,
    POLICY_NAME,
    RUN_NAME,
    random_name,
)
from megatron.rl.checkpoint.folder import CheckpointFolder
from megatron.rl.checkpoint.free_space import Room, room_for
from megatron.rl.checkpoint.layout_sizes import layout_sizes
from megatron.rl.checkpoint.manifest import (
    FileEntry,
    Manifest,
    describe_file,
    read_manifest,
    write_manifest,
)
from megatron.rl.checkpoint.metadata_file import METADATA_NAME
from megatron.rl.checkpoint.optimizer_state import check_optimizer, optimizer_step
from megatron.rl.checkpoint.policy_shards import shards_to_save
from megatron.rl.checkpoint.random_state import random_state_json
from megatron.rl.checkpoint.run_state import RunState
from megatron.rl.checkpoint.save_report import SaveReport
from megatron.rl.checkpoint.settings import CheckpointConfig
from megatron.rl.checkpoint.shard_files import ShardFiles
from megatron.rl.errors import UserError
from megatron.rl.policy.model import Policy

# Writes one file at the path that it is given. Called once, perhaps from another thread while the
# policy trains: what it writes must not change meanwhile.
WriteFile = Callable[[Path], None]


@dataclass(frozen=True)
class _Written:
    """What this rank has written, all of it on the disk."""

    results: list[WriteResult]
    files: dict[str, FileEntry]
    seconds: float


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    run: RunState
    score: float | None
    policy_json: str
    partial: Path
    shards: Sequence[ShardedTensor]
    blocked_s: float = 0.0
    written: _Written | None = None
    error: Exception | None = None
    thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()

    def do(self, work: Callable[[], _Written]) -> None:
        try:
            self.written = work()
        except Exception as error:  # reported by all ranks together, when they finish
            self.error = error


@dataclass
class _Deletion:
    """Folders that are no checkpoints any more and take a while to delete."""

    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, paths: Sequence[Path]) -> None:
        for path in paths:
            thread = threading.Thread(
                target=shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}, daemon=True
            )
            thread.start()
            self.threads.append(thread)

    def wait(self) -> None:
        while self.threads:
            self.threads.pop().join()


class CheckpointWriter:
    """Saves one run, on all of its ranks. All methods are collective.

    A checkpoint that cannot be written is reported, not raised: the run goes on, and the
    checkpoints before it stay. Ranks never wait for one that failed.

    Args:
        run_folder: the checkpoints are in ``checkpoints/`` in it. All ranks must see it.
    """

    def __init__(self, settings: CheckpointConfig, run_folder: Path, policy: Policy) -> None:
        self._settings = settings
        self._folder = CheckpointFolder(run_folder / "checkpoints")
        self._policy = policy
        self._files = ShardFiles()
        self._pending: _Pending | None = None
        self._deletion = _Deletion()

    def start(self) -> int:
        """Check before training that checkpoints can be written; remove leftovers.

        Returns:
            The number of folders that a killed process had left behind.

        Raises:
            UserError: the optimizer's state cannot be saved, the disk has too little room or
                refuses, or a rank does not see the folder.
        """
        check_optimizer(self._policy.optimizer)
        self._files.agree(shards_to_save(self._policy).tensors)
        try:
            leftovers = from_rank_0(self._folder.remove_leftovers)
            room = self._room()
            probe = from_rank_0(lambda: self._folder.start_partial(0))
        except RankFailed as error:
            raise UserError(
                f"checkpoints cannot be written ({error}); checkpoint.every=0 trains without them"
            ) from error
        try:
            on_all_ranks(lambda: _require_writable(probe))
        finally:
            from_rank_0(lambda: self._folder.discard(probe))
        if not room.enough:
            raise UserError(room.shortage(self._folder.path))
        return leftovers

    def save(
        self,
        run: RunState,
        *,
        score: float | None = None,
        extra: Mapping[str, WriteFile] | None = None,
    ) -> SaveReport | None:
        """Save everything, between two optimizer steps.

        Args:
            run: the same on every rank.
            score: held-out score of these weights, if it was measured; the same on every rank.
            extra: further files of this rank, by names that no other rank uses.

        Returns:
            The report of a checkpoint that this call has finished: its own, or with
            ``async_save`` the one before, if that was still being written.
        """
        before = self._finish_pending()
        started = time.perf_counter()
        run_json = run.to_json()  # raises here, before any rank relies on it
        try:
            room = self._room()
            if not room.enough:
                raise RankFailed(room.shortage(self._folder.path))
            pending = self._begin(run, score)
        except RankFailed as error:
            return _failure(run.step, str(error), time.perf_counter() - started)
        records = {random_name(dist.get_rank()): random_state_json()}
        if dist.get_rank() == 0:
            records |= {RUN_NAME: run_json, POLICY_NAME: pending.policy_json}

        def work() -> _Written:
            return self._write(pending.partial, pending.shards, records, extra or {})

        self._pending = pending
        if self._settings.async_save:
            pending.thread = threading.Thread(target=pending.do, args=(work,), daemon=True)
            pending.thread.start()
            pending.blocked_s = time.perf_counter() - started
            return before
        pending.do(work)
        pending.blocked_s = time.perf_counter() - started
        return self._finish_pending()

    def collect(self) -> SaveReport | None:
        """Publish the checkpoint that is being written, if all ranks have written it.

        To be called at every step; costs nothing while none is being written.
        """
        if self._pending is None or not all_ranks(self._pending.done):
            return None
        return self._finish_pending()

    def finish(self) -> SaveReport | None:
        """Wait for the checkpoint that is being written and publish it; return its report."""
        report = self._finish_pending()
        self._deletion.wait()
        return report

    def _finish_pending(self) -> SaveReport | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        started = time.perf_counter()
        if pending.thread is not None:
            pending.thread.join()
        report = self._publish(pending)
        return replace(report, blocked_s=pending.blocked_s + time.perf_counter() - started)

    def _room(self) -> Room:
        """Measure on rank 0, whose disk it is; all ranks get the same answer."""
        return from_rank_0(
            lambda: room_for(self._folder.path, self._files.nbytes, self._settings.min_free_gib)
        )

    def _begin(self, run: RunState, score: float | None) -> _Pending:
        """Copy what has to be copied, and make a folder for it."""
        shards = on_all_ranks(self._shards)
        partial = from_rank_0(lambda: self._folder.start_partial(run.step))
        steps = [0] * dist.get_world_size()
        # A rank without a slice of the optimizer has counted nothing.
        dist.all_gather_object(steps, optimizer_step(self._policy.optimizer))
        policy_json = json.dumps(
            {"optimizer_step": max(steps), "schedule_steps": self._policy.schedule_steps}
        )
        return _Pending(run, score, policy_json, partial, shards)

    def _shards(self) -> list[ShardedTensor]:
        shards = shards_to_save(self._policy).tensors
        return self._files.stage(shards) if self._settings.async_save else shards

    def _write(
        self,
        partial: Path,
        shards: Sequence[ShardedTensor],
        records: Mapping[str, str],
        extra: Mapping[str, WriteFile],
    ) -> _Written:
        started = time.perf_counter()
        results = self._files.write(partial, shards)
        names = sorted({str(result.storage_data.relative_path) for result in results})
        for name, content in records.items():
            write_flushed(partial / name, content.encode())
        for name, write in extra.items():
            path = partial / EXTRA_FOLDER / name
            path.parent.mkdir(exist_ok=True)
            write(path)
            flush_file(path)
            flush_folder(path.parent)
        names += [*records, *(f"{EXTRA_FOLDER}/{name}" for name in extra)]
        files = {name: describe_file(partial / name) for name in names}
        return _Written(results, files, time.perf_counter() - started)

    def _publish(self, pending: _Pending) -> SaveReport:
        """Make a checkpoint of what all ranks have written, or remove it."""
        step = pending.run.step
        failure = first_failure(pending.error)
        if failure is not None:
            from_rank_0(lambda: self._folder.discard(pending.partial))
            return _failure(step, failure[1], 0.0)
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(pending.written, everyone)
        try:
            path, nbytes, write_s = from_rank_0(lambda: self._complete(pending, everyone or []))
        except RankFailed as error:
            from_rank_0(lambda: self._folder.discard(pending.partial))
            return _failure(step, str(error), 0.0)
        return SaveReport(step, path, None, nbytes, 0.0, write_s)

    def _complete(
        self, pending: _Pending, everyone: Sequence[_Written | None]
    ) -> tuple[Path, int, float]:
        """Write what makes it complete and give it its name; delete old ones. On rank 0."""
        partial = pending.partial
        written = [of_rank for of_rank in everyone if of_rank is not None]
        self._files.finish(partial, [of_rank.results for of_rank in written])
        files: dict[str, FileEntry] = {}
        for of_rank in written:
            if twice := files.keys() & of_rank.files.keys():
                raise ValueError(f"{min(twice)} was written by two ranks")
            files |= of_rank.files
        for index in (METADATA_NAME, FORMAT_NAME):
            flush_file(partial / index)
            files[index] = describe_file(partial / index)
        layout = layout_sizes(self._policy.layout)
        manifest = Manifest(pending.run.step, pending.score, layout, files)
        write_manifest(partial, manifest)
        read_manifest(partial)  # files that this rank cannot see are on another disk
        name = self._folder.publish(partial, pending.run.step)
        settings = self._settings
        self._deletion.wait()
        self._deletion.start(self._folder.prune(name, settings.keep, settings.keep_best))
        seconds = max(of_rank.seconds for of_rank in written)
        return self._folder.path / str(name), manifest.nbytes, seconds


def _failure(step: int, reason: str, blocked_s: float) -> SaveReport:
    return SaveReport(step, None, reason, 0, blocked_s, 0.0)


def _require_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"rank {dist.get_rank()} cannot write to {folder.parent}, where checkpoints are "
            "saved: all ranks need the same run.folder on a shared disk"
        )
