# SPDX-License-Identifier: Apache-2.0
"""Memory for all weights of an update, which another process can map and nobody can leak.

The memory has no name on disk (`memfd_create`, which knows no limit of /dev/shm): it lives as long
as someone holds it, so a killed trainer leaves no gigabytes behind. The engine maps it as
/proc/<trainer>/fd/<n>. It is kept from one update to the next, because touching new pages costs
as much as copying into them, and because a restarted engine gets its weights from here.
"""

import contextlib
import math
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..checkpoint_index import TensorInfo
from ..errors import EngineError

if TYPE_CHECKING:
    import torch

# Every tensor starts at a cache line, which also satisfies vector loads.
ALIGNMENT_BYTES = 64
# Room that must stay free beside the weights, so that they do not take the last page.
_SPARE_BYTES = 64 << 20
_GIB = float(1 << 30)


class WeightsBuffer:
    """One block of memory with a place for every tensor of a manifest.

    `path` is valid while this process lives and has not closed it.
    """

    def __init__(self, manifest: Mapping[str, TensorInfo]) -> None:
        """Reserve the memory; raise EngineError when neither memory nor disk has room."""
        self._manifest = dict(manifest)
        self._offsets: dict[str, int] = {}
        end = 0
        for name, info in self._manifest.items():
            self._offsets[name] = end
            end += -(-info.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.num_bytes = max(end, ALIGNMENT_BYTES)
        self._file, self.folder = _reserve(self.num_bytes)
        self._map: mmap.mmap | None = mmap.mmap(self._file, self.num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def offset(self, name: str) -> int:
        """Where the tensor starts, in bytes."""
        return self._offsets[name]

    def tensor(self, name: str) -> "torch.Tensor":
        """The tensor's place, as a writable tensor of its type and shape."""
        assert self._map is not None, "this buffer was closed"
        return map_tensor(self._map, self._manifest[name], self._offsets[name])

    def close(self) -> None:
        """Give the memory back, even when a forked child happened to inherit the open file.

        Tensors made by `tensor` must not be used any more (they would read zeros).
        """
        if self._map is None:
            return
        with contextlib.suppress(OSError):  # a file system that cannot punch holes
            self._map.madvise(mmap.MADV_REMOVE)
        # Not `close()`: torch keeps the mapping alive for its tensors, but does not lock it.
        self._map = None
        os.close(self._file)


def map_tensor(mapped: mmap.mmap, info: TensorInfo, offset: int) -> "torch.Tensor":
    """A tensor over a part of a mapping, without a copy."""
    import torch

    dtype = info.torch_dtype
    count = math.prod(info.shape)
    if count == 0:
        return torch.empty(info.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The engine maps read-only, so that it cannot spoil what a restart needs.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)
    return flat.view(info.shape)


def _reserve(num_bytes: int) -> tuple[int, str]:
    """An open file of this size and where it lies: memory when there is room, else the disk."""
    need = num_bytes + _SPARE_BYTES
    memory, temporary = _available_memory_bytes(), tempfile.gettempdir()
    if memory >= need:
        file = os.memfd_create("rollout-weights", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        return file, "memory"
    disk = shutil.disk_usage(temporary).free
    if disk < need:
        raise EngineError(
            f"no room for the weights on their way to the engine: {need / _GIB:.1f} GiB needed, "
            f"free: memory {memory / _GIB:.1f} GiB, {temporary} {disk / _GIB:.1f} GiB. Use a "
            "machine with more memory, or set TMPDIR to a larger disk"
        )
    with tempfile.TemporaryFile(dir=temporary, prefix="rollout-weights-") as stream:
        file = os.dup(stream.fileno())
    os.ftruncate(file, num_bytes)
    return file, temporary


def _available_memory_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
