# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors to files and back, in Megatron's ``torch_dist`` format.

Planning and finishing need all ranks; writing needs none, so that it can go on in a thread while
the policy trains. Megatron's own asynchronous writer would do the same from processes that it
spawns; a thread starts at once, never outlives the rank, and what takes its time (hashing,
copying, waiting for the disk) releases the interpreter.
"""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, SavePlan, load
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from megatron.rl.checkpoint.agreement import on_all_ranks
from megatron.rl.checkpoint.manifest import DamagedCheckpoint
from megatron.rl.checkpoint.metadata_file import IndexReader
from megatron.rl.checkpoint.policy_shards import CONTENT_METADATA
from megatron.rl.errors import UserError

# What `megatron.core.dist_checkpointing.load` looks for first. We read it nowhere.
_COMMON_STATE = ShardedObject("common_state", None, (1,), (0,)).unique_key


class ShardFiles:
    """Writes the tensors of one policy, again and again, each time into another folder.

    Which rank writes what is agreed on once: the shards must have the same keys, shapes and order
    each time.
    """

    def __init__(self) -> None:
        self._plan: SavePlan | None = None
        self._index: Metadata | None = None
        self._staged: list[ShardedTensor] | None = None
        self.nbytes = 0
        """Of the tensors of all ranks; known when they have agreed."""

    def agree(self, shards: Sequence[ShardedTensor]) -> None:
        """Plan, the first time, who writes what. Collective.

        Raises:
            ValueError: shards overlap, or leave a part of a tensor out.
        """
        if self._plan is not None:
            return
        planner, _ = _planner(shards)
        plan = planner.create_local_plan()
        plans = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(plan, plans)

        def combine() -> None:
            if plans is not None:
                _, self._index = planner.create_global_plan(plans)

        on_all_ranks(combine)
        prefixed = FileSystemWriter("").prepare_global_plan([plan] * dist.get_world_size())
        self._plan = prefixed[dist.get_rank()]
        sizes = [0] * dist.get_world_size()
        own = sum(shard.data.numel() * shard.data.element_size() for shard in shards)
        dist.all_gather_object(sizes, own)
        self.nbytes = sum(sizes)

    def stage(self, shards: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Copy the shards to host memory that is kept for the next time; return the copies."""
        if self._staged is None:
            self._staged = [replace(shard, data=_host_buffer(shard.data)) for shard in shards]
        for shard, copy in zip(shards, self._staged, strict=True):
            copy.data.copy_(shard.data, non_blocking=True)
        if any(shard.data.is_cuda for shard in shards):
            torch.cuda.synchronize()
        return self._staged

    def write(self, folder: Path, shards: Sequence[ShardedTensor]) -> list[WriteResult]:
        """Write this rank's shards and wait until they are on the disk. Not collective.

        Raises:
            OSError: the disk is full, or refuses.
        """
        assert self._plan is not None, "agree() comes first"
        planner, state = _planner(shards)
        if not state:
            return []
        results: list[WriteResult] = _writer(folder).write_data(self._plan, planner).value()
        return results

    def finish(self, folder: Path, results: list[list[WriteResult]]) -> None:
        """Write the index, on rank 0, from what :meth:`write` returned on each rank."""
        assert self._index is not None, "rank 0 has the index"
        _writer(folder).finish(self._index, results)
        save_config(CheckpointingConfig("torch_dist"), str(folder))


def read_shards(folder: Path, shards: Sequence[ShardedTensor]) -> None:
    """Fill the shards' memory from a checkpoint of any layout. Collective.

    Each rank opens only files, and reads only pieces of at most ``MAX_PIECE_BYTES``, that overlap
    with its shards.

    Raises:
        UserError: the checkpoint is of another model, or damaged; on every rank.
    """

    def read() -> None:
        padded = {shard.key: shard for shard in shards if shard.allow_shape_mismatch}
        exact = [shard for shard in shards if not shard.allow_shape_mismatch]
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=exact,
            allow_shape_mismatch_sharded_tensors=padded,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        state = mcore_to_pyt_state_dict(_by_key(shards), is_loading=True)
        try:
            load(state, storage_reader=IndexReader(folder), planner=planner, no_dist=True)
        except (CheckpointException, CheckpointingException, DamagedCheckpoint, KeyError) as error:
            reason = " ".join(str(_cause(error)).split())[:300]
            raise UserError(f"{folder} cannot be loaded into this model: {reason}") from error

    on_all_ranks(read)


def _cause(error: BaseException) -> BaseException:
    """What lies behind torch's collection of the ranks' failures."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _by_key(shards: Sequence[ShardedTensor]) -> dict[str, list[Any]]:
    grouped: dict[str, list[Any]] = {}
    for shard in shards:
        grouped.setdefault(shard.key, []).append(shard)
    return grouped


def _planner(shards: Sequence[ShardedTensor]) -> tuple[MCoreSavePlanner, dict[str, Any]]:
    first = dist.get_rank() == 0
    state: dict[str, Any] = mcore_to_pyt_state_dict(_by_key(shards))
    if first:
        common = io.BytesIO()
        optimizer = {"distrib_optim_sharding_type": "fully_reshardable"}
        torch.save([{"content_metadata": CONTENT_METADATA | optimizer}], common)
        state[_COMMON_STATE] = common
    planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=first)
    return planner, state


class _PlainWriter(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Name no folder: it will be renamed."""
        return StorageMeta(save_id=self.save_id)


def _writer(folder: Path) -> FileSystemWriter:
    return _PlainWriter(folder, sync_files=True, thread_count=1)


def _host_buffer(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
