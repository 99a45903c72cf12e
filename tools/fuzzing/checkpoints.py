# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders, through the reader that a resumed run uses, on one rank."""

import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from megatron.rl.checkpoint.file_names import POLICY_NAME, RUN_NAME, random_name
from megatron.rl.checkpoint.folder import CheckpointFolder
from megatron.rl.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    describe_file,
    write_manifest,
)
from megatron.rl.checkpoint.random_state import random_state_json, restore_random_state
from megatron.rl.checkpoint.reader import find_newest
from megatron.rl.checkpoint.run_state import RunState, read_file, read_object
from megatron.rl.checkpoint.shard_files import ShardFiles, read_shards
from megatron.rl.errors import UserError
from tools.fuzzing.mutations import damaged_bytes, damaged_text, damaged_tree
from tools.fuzzing.target import WrongAnswer

STEP = 3
PLAIN_FILES = (RUN_NAME, POLICY_NAME, random_name(0))


class Checkpoints:
    """Files whose digests differ, and files that somebody changed together with their digests."""

    name = "checkpoint"
    limit_s = 60.0

    def prepare(self, folder: Path) -> None:
        """Save a checkpoint of two tensors, as one rank."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._run, self._good = folder / "run", folder / "good"
        checkpoints = CheckpointFolder(self._run / "checkpoints")
        partial = checkpoints.start_partial(STEP)
        files, shards = ShardFiles(), _shards(fill=True)
        files.agree(shards)
        files.finish(partial, [files.write(partial, shards)])
        state = RunState(STEP, 1, 1, "digest", prompts={"0": {"seed": 1, "index": 5}})
        (partial / RUN_NAME).write_text(state.to_json())
        (partial / POLICY_NAME).write_text('{"optimizer_step": 3, "schedule_steps": 3}')
        (partial / random_name(0)).write_text(random_state_json())
        _describe(partial)
        self._path = self._run / "checkpoints" / str(checkpoints.publish(partial, STEP))
        shutil.copytree(self._path, self._good)
        self._names = [path.name for path in self._good.iterdir()]
        if not self._read():
            raise WrongAnswer("the good checkpoint was not found")

    def attempt(self, rng: random.Random) -> bool:
        """Damage one or two files; mostly with digests that agree with the damage."""
        shutil.rmtree(self._path)
        shutil.copytree(self._good, self._path)
        for _ in range(rng.choice((1, 1, 1, 2))):
            name = rng.choice(self._names)
            _damage(rng, self._path / name, (self._good / name).read_bytes())
        if rng.random() < 0.75 and (self._path / MANIFEST_NAME).is_file():
            _describe(self._path)
            if rng.random() < 0.2:
                _other_manifest(rng, self._path / MANIFEST_NAME)
        try:
            return self._read()
        except UserError:
            return False

    def close(self) -> None:
        """Leave the group of one."""
        dist.destroy_process_group()

    def _read(self) -> bool:
        """What a resumed run reads, but for the policy around the tensors."""
        found = find_newest(self._run)
        if found is None:
            return False
        found.explain()
        read_object(read_file(found.path / POLICY_NAME), POLICY_NAME)
        name = random_name(0)
        restore_random_state(read_file(found.path / name), name)
        read_shards(found.path, _shards(fill=False))
        return True


def _shards(*, fill: bool) -> Sequence[ShardedTensor]:
    matrix = torch.arange(48.0).reshape(8, 6) if fill else torch.zeros(8, 6)
    vector = torch.ones(7, dtype=torch.bfloat16) if fill else torch.zeros(7, dtype=torch.bfloat16)
    return [
        ShardedTensor.from_rank_offsets("model.matrix", matrix, replica_id=0),
        ShardedTensor.from_rank_offsets("model.vector", vector, replica_id=0),
    ]


def _describe(folder: Path) -> None:
    """Write a manifest that agrees with the files."""
    files = {path.name: describe_file(path) for path in folder.iterdir() if path.is_file()}
    files.pop(MANIFEST_NAME, None)
    write_manifest(folder, Manifest(STEP, 0.5, {"tensor": 1}, files))


def _damage(rng: random.Random, path: Path, good: bytes) -> None:
    """Damage a file whose content was good before the first damage."""
    if not path.is_file():
        return
    match rng.randrange(5):
        case 0 if path.name in PLAIN_FILES:
            tree = damaged_tree(rng, json.loads(good))
            path.write_text(json.dumps(tree))
        case 1 if path.suffix == ".json":
            text = damaged_text(rng, good.decode())
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        case 2 if rng.random() < 0.3:
            path.unlink()
            if rng.random() < 0.5:
                path.mkdir()
        case _:
            path.write_bytes(damaged_bytes(rng, good))


def _other_manifest(rng: random.Random, path: Path) -> None:
    """Change a manifest so that its own digest agrees."""
    content = json.loads(path.read_text().partition("\n")[0])
    text = json.dumps(damaged_tree(rng, content))
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f"{text}\n{digest}\n")
