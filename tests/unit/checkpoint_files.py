# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a few small files, for tests of what happens to the folders."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.rl.checkpoint.durable import write_flushed
from megatron.rl.checkpoint.folder import CheckpointFolder, CheckpointName
from megatron.rl.checkpoint.manifest import Manifest, describe_file, write_manifest

LAYOUT = {"tensor": 1}


def save(
    folder: CheckpointFolder,
    step: int,
    *,
    score: float | None = None,
    keep: int = 2,
    keep_best: bool = False,
    file_bytes: int = 100,
) -> CheckpointName:
    """Save and prune as the writer does, and delete what was pruned."""
    partial = folder.start_partial(step)
    (partial / "extra").mkdir()
    files = {}
    for name in ("tensors", "run.json", "extra/rollouts"):
        write_flushed(partial / name, f"{step} {name} ".encode() + os.urandom(file_bytes))
        files[name] = describe_file(partial / name)
    write_manifest(partial, Manifest(step, score, LAYOUT, files))
    name_of = folder.publish(partial, step)
    for old in folder.prune(name_of, keep, keep_best):
        folder.discard(old)
    return name_of


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)
