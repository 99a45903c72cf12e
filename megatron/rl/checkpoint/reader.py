# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoint that a run continues from, and loads it in whatever layout there is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.rl.checkpoint.agreement import from_rank_0, on_all_ranks
from megatron.rl.checkpoint.file_names import EXTRA_FOLDER, POLICY_NAME, RUN_NAME, random_name
from megatron.rl.checkpoint.folder import (
    CheckpointFolder,
    CompleteCheckpoint,
    RefusedCheckpoint,
)
from megatron.rl.checkpoint.layout_sizes import layout_sizes
from megatron.rl.checkpoint.manifest import Manifest, find_damage
from megatron.rl.checkpoint.optimizer_state import set_optimizer_step
from megatron.rl.checkpoint.policy_shards import reload_masters, shards_to_load
from megatron.rl.checkpoint.random_state import restore_random_state
from megatron.rl.checkpoint.run_state import RunState, read_file, read_object
from megatron.rl.checkpoint.shard_files import read_shards
from megatron.rl.errors import UserError
from megatron.rl.policy.model import Policy


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint, every file of which is what was saved.

    Attributes:
        run: where the run stood.
        passed_over: newer ones that are not complete, the newest first.
    """

    path: Path
    manifest: Manifest
    run: RunState
    passed_over: tuple[RefusedCheckpoint, ...] = ()

    def explain(self) -> str:
        """Say which one it is, and why none of the newer ones."""
        reasons = [f"; passed over {old.path.name}: {old.reason}" for old in self.passed_over]
        return f"continuing from {self.path.name}{''.join(reasons)}"

    def extra_file(self, name: str) -> Path | None:
        """Return the path of a file that was saved under this name; None if there was none."""
        known = f"{EXTRA_FOLDER}/{name}" in self.manifest.files
        return self.path / EXTRA_FOLDER / name if known else None

    def load_into(self, policy: Policy) -> RunState:
        """Load everything; the policy may have another layout. Collective.

        Generators of random numbers are restored where the layout is the same.

        Raises:
            UserError: it is of another model, or not to be read; on every rank.
        """
        policy.restore()
        shards = shards_to_load(policy)
        read_shards(self.path, shards.tensors)
        for owned in shards.slices:
            owned.write_back()
        steps = on_all_ranks(lambda: read_object(read_file(self.path / POLICY_NAME), POLICY_NAME))
        set_optimizer_step(policy.optimizer, steps["optimizer_step"])
        policy.resume_schedule(steps["schedule_steps"])
        if self.manifest.layout == layout_sizes(policy.layout):
            name = random_name(dist.get_rank())
            on_all_ranks(lambda: restore_random_state(read_file(self.path / name), name))
        return self.run

    def load_weights_into(self, policy: Policy) -> None:
        """Load the weights alone: the optimizer starts anew from them. Collective.

        Raises:
            UserError: it is of another model, or not to be read; on every rank.
        """
        read_shards(self.path, shards_to_load(policy, optimizer=False).tensors)
        reload_masters(policy)


def find_newest(run_folder: Path) -> FoundCheckpoint | None:
    """Return the newest complete checkpoint of a run, None when it has saved none. Collective.

    Every byte of it is read once to compare digests, each rank an even share of the files: at
    about 2 GB/s a rank, or as fast as the disk. One with a difference is passed over.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    folder = CheckpointFolder(run_folder / "checkpoints")
    complete, refused = from_rank_0(folder.survey)
    for candidate in complete:
        if (damage := _verify(candidate)) is None:
            newer = [old for old in refused if old.name > candidate.name]
            return _open(candidate, sorted(newer, key=lambda old: old.name, reverse=True))
        refused.append(RefusedCheckpoint(candidate.name, candidate.path, damage))
    if not refused:
        return None
    reasons = "; ".join(f"{old.path.name}: {old.reason}" for old in refused)
    raise UserError(
        f"none of the checkpoints in {folder.path} can be loaded ({reasons}). To train from the "
        "start, move that folder away"
    )


def _verify(candidate: CompleteCheckpoint) -> str | None:
    """Compare the digests, together with the other ranks; return the first difference."""
    told: list[str | None] = [None] * dist.get_world_size()
    damage = find_damage(candidate.path, candidate.manifest, dist.get_rank(), dist.get_world_size())
    dist.all_gather_object(told, damage)
    return next((found for found in told if found is not None), None)


def _open(candidate: CompleteCheckpoint, newer: Sequence[RefusedCheckpoint]) -> FoundCheckpoint:
    def read() -> RunState:
        path = candidate.path / RUN_NAME
        return RunState.from_json(read_file(path), str(path))

    return FoundCheckpoint(candidate.path, candidate.manifest, on_all_ranks(read), tuple(newer))
