# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint still fits on the disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
# The writer's own records and the file system's blocks, on top of the tensors.
_OVERHEAD = 1.02
_OVERHEAD_BYTES = 16 << 20


@dataclass(frozen=True)
class Room:
    """What a checkpoint needs and what there is, in bytes; ``reserve`` shall stay free."""

    needed: int
    reserve: int
    free: int

    @property
    def enough(self) -> bool:
        return self.free >= self.needed + self.reserve

    def shortage(self, folder: Path) -> str:
        """Say what is missing and which setting changes it."""
        return (
            f"a checkpoint needs {self.needed / GIB:.2f} GiB and checkpoint.min_free_gib keeps "
            f"{self.reserve / GIB:g} GiB free, but the disk of {folder} has {self.free / GIB:.2f} "
            "GiB left: free some, lower checkpoint.keep, or move run.folder"
        )


def room_for(folder: Path, tensor_bytes: int, reserve_gib: float) -> Room:
    """Measure the room for a checkpoint with so many bytes of tensors.

    Args:
        folder: where it will be written; it or a parent exists.
    """
    while not folder.exists():
        folder = folder.parent
    needed = int(tensor_bytes * _OVERHEAD) + _OVERHEAD_BYTES
    return Room(needed, int(reserve_gib * GIB), shutil.disk_usage(folder).free)
