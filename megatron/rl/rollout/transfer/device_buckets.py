# SPDX-License-Identifier: Apache-2.0
"""Two buffers on one device: a bucket of weights is filled while the other one is sent and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checkpoint_index import SCALE_SUFFIX, TensorInfo
from ..errors import EngineError

if TYPE_CHECKING:
    import torch

NUM_BUFFERS = 2


@dataclass(frozen=True)
class FilledBucket:
    """Where a bucket lies: which buffer, each tensor's offset, and the bytes up to the last."""

    buffer: int
    offsets: tuple[int, ...]
    num_bytes: int


class DeviceBuckets:
    """Slots for the tensors of an update, given out bucket by bucket."""

    def __init__(
        self,
        manifest: Mapping[str, TensorInfo],
        bucket_bytes: int,
        device: "torch.device",
        alignment: int,
    ) -> None:
        """Reserve both buffers. A bucket is full once it holds ``bucket_bytes``, and may exceed
        them by its last tensor with its scales.
        """
        import torch

        self._manifest = dict(manifest)
        self._alignment = alignment
        scales = [i.num_bytes for n, i in manifest.items() if n.endswith(SCALE_SUFFIX)]
        others = [i.num_bytes for n, i in manifest.items() if not n.endswith(SCALE_SUFFIX)]
        total = sum(scales) + sum(others)
        limit = bucket_bytes + max(others, default=0) + max(scales, default=0)
        self.capacity = max(min(total, limit), 1) + alignment * len(manifest)
        self.buffers = tuple(
            torch.empty(self.capacity, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)
        )
        self._filling = 0
        self._offsets: dict[str, int] = {}
        self._end = 0
        self._read: list[tuple[str, ...] | None] = [None] * NUM_BUFFERS

    def begin(self) -> None:
        """A new update: whatever an unfinished one left is forgotten."""
        self._offsets, self._end = {}, 0
        self._read = [None] * NUM_BUFFERS

    def slot(self, name: str) -> "torch.Tensor":
        """The tensor's place in the bucket that is being filled; the same when asked again."""
        if self._read[self._filling] is not None:
            raise EngineError(
                f"no room for {name}: both buffers of the transport hold buckets that the engine "
                "has not read"
            )
        info = self._manifest[name]
        start = self._offsets.get(name)
        if start is None:
            start = -(-self._end // self._alignment) * self._alignment
            if start % info.torch_dtype.itemsize:
                raise EngineError(
                    f"{name} ({info.dtype}) would start at byte {start} of its bucket, and the "
                    "receiver cannot read that: a tensor before it has an odd number of elements "
                    "in a narrower type. Use bridge.transport cuda_ipc or shared_memory"
                )
            if start + info.num_bytes > self.capacity:
                raise EngineError(f"a bucket of weights exceeds {self.capacity} bytes at {name}")
            self._offsets[name] = start
            self._end = start + info.num_bytes
        part = self.buffers[self._filling][start : start + info.num_bytes]
        return part.view(info.torch_dtype).view(info.shape)

    def cut(self, bucket: Sequence[str]) -> FilledBucket:
        """End the bucket that is being filled, and go on in the other buffer."""
        if list(bucket) != list(self._offsets):
            raise EngineError(
                f"a bucket of {len(bucket)} tensors, but {len(self._offsets)} slots were taken "
                "since the last, in another order"
            )
        filled = FilledBucket(self._filling, tuple(self._offsets.values()), self._end)
        self._read[self._filling] = tuple(bucket)
        self._filling = (self._filling + 1) % NUM_BUFFERS
        self._offsets, self._end = {}, 0
        return filled

    def release(self, bucket: Sequence[str]) -> None:
        """The engine has read this bucket: its buffer may be filled again."""
        self._read[self._read.index(tuple(bucket))] = None
