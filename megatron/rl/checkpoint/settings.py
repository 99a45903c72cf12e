# SPDX-License-Identifier: Apache-2.0
"""How often a run saves itself, and what it keeps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of the whole run, ``checkpoints/`` in its folder; see docs/checkpoints.md."""

    every: int = 10
    """Save after every so many rollout batches, and at the end; 0: never."""
    keep: int = 2
    """Checkpoints to keep, the newest."""
    keep_best: bool = False
    """Keep the one with the best held-out reward as well."""
    async_save: bool = True
    """Train on while a copy in host memory is being written. Off, training waits and no host
    memory is needed."""
    min_free_gib: float = 1.0
    """Disk space to leave free: a checkpoint that would not is not written, and the run says so."""
