# SPDX-License-Identifier: Apache-2.0
"""Weights for an engine on the trainer's own GPUs: it reads them where the trainer packed them.

Two buffers are exported once. A handle is bytes that the CUDA driver gives out; here it travels as
text in typed fields, and every field is checked before CUDA sees it. Nothing is pickled.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import EngineConfigError, EngineRequestError
from .device_buckets import DeviceBuckets
from .weight_transport import CUDA_IPC_BACKEND, Manifest, WeightTransport

if TYPE_CHECKING:
    import torch

# Any type may start there, and vector loads like it.
ALIGNMENT_BYTES = 256
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MAX_HANDLE_BYTES = 1024
# torch's handle of memory in an expandable segment: a version byte, then this one.
_EXPANDABLE_MARK = ord("e")


@dataclass(frozen=True)
class CudaIpcHandle:
    """One exported buffer of bytes, for one receiver.

    Attributes:
        device_uuid: the GPU that holds it, as `torch.cuda.get_device_properties` names it.
        num_bytes: of the buffer.
        storage_bytes, storage_offset_bytes: its place in the CUDA allocation of the handle.
        memory_handle, event_handle: the driver's, with torch's own marks.
        ref_counter_handle, ref_counter_offset: where torch counts that it is still read.
        event_sync_required: whether to wait for the event before reading.
    """

    device_uuid: str
    num_bytes: int
    storage_bytes: int
    storage_offset_bytes: int
    memory_handle: bytes
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    @classmethod
    def from_reduction(cls, arguments: Sequence[Any], device_uuid: str) -> "CudaIpcHandle":
        """From what `torch.multiprocessing.reductions.reduce_tensor` says of a uint8 vector.

        Its 15 arguments are those of `rebuild_cuda_tensor`, in that order.
        """
        (
            _, size, stride, offset, _, dtype, _, memory_handle, storage_bytes,
            storage_offset_bytes, requires_grad, counter, counter_offset, event, synchronize,
        ) = arguments  # fmt: skip
        if str(dtype) != "torch.uint8" or len(size) != 1 or tuple(stride) != (1,) or offset:
            raise EngineRequestError(
                f"a whole vector of bytes can be exported, got {dtype} of size {tuple(size)}, "
                f"stride {tuple(stride)}, offset {offset}"
            )
        assert not requires_grad
        handle = cls(
            device_uuid, int(size[0]), storage_bytes, storage_offset_bytes, memory_handle,
            counter, counter_offset, event, bool(synchronize),
        )  # fmt: skip
        handle._check()
        return handle

    def to_fields(self) -> dict[str, Any]:
        """As JSON can carry it: bytes in hexadecimal."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v.hex() if isinstance(v, bytes) else v for n, v in values.items()}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "CudaIpcHandle":
        """Undo :meth:`to_fields`; raise EngineRequestError for anything that it did not make."""
        types = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != set(types):
            raise EngineRequestError(f"a CUDA IPC handle has the fields {sorted(types)}")
        arguments: dict[str, Any] = {}
        for name, kind in types.items():
            value, wire = values[name], str if kind is bytes else kind
            if type(value) is not wire:
                raise EngineRequestError(
                    f"{name} of a CUDA IPC handle must be {wire.__name__}, got {value!r:.40}"  # type: ignore[union-attr]
                )
            try:
                arguments[name] = bytes.fromhex(value) if kind is bytes else value
            except ValueError:
                raise EngineRequestError(
                    f"{name} of a CUDA IPC handle is no hexadecimal text"
                ) from None
        handle = cls(**arguments)
        handle._check()
        return handle

    def rebuild_arguments(self, device_index: int) -> tuple[Any, ...]:
        """Arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor` in this process."""
        import torch

        return (
            torch.Tensor, torch.Size([self.num_bytes]), (1,), 0, torch.storage.TypedStorage,
            torch.uint8, device_index, self.memory_handle, self.storage_bytes,
            self.storage_offset_bytes, False, self.ref_counter_handle, self.ref_counter_offset,
            self.event_handle, self.event_sync_required,
        )  # fmt: skip

    def _check(self) -> None:
        for name in ("memory_handle", "ref_counter_handle", "event_handle"):
            size = len(getattr(self, name))
            least = 0 if name == "event_handle" else 1  # an event is optional
            if not least <= size <= MAX_HANDLE_BYTES:
                raise EngineRequestError(f"{name} of a CUDA IPC handle has {size} bytes")
        if len(self.memory_handle) > 1 and self.memory_handle[1] == _EXPANDABLE_MARK:
            raise _expandable("the buffer was allocated in one")
        if (
            min(self.num_bytes, self.storage_offset_bytes, self.ref_counter_offset) < 0
            or self.num_bytes > self.storage_bytes
        ):
            raise EngineRequestError(
                f"a CUDA IPC handle of {self.num_bytes} bytes in a storage of {self.storage_bytes}"
            )


class CudaIpcTransport(WeightTransport):
    """The sending half. The buffers are on the current CUDA device."""

    backend = CUDA_IPC_BACKEND
    keeps_weights = False
    max_in_flight = 1

    def __init__(self, bucket_bytes: int, num_receivers: int) -> None:
        """Raises EngineConfigError where the allocator's memory cannot be exported."""
        check_allocator(os.environ)
        self._bucket_bytes = bucket_bytes
        self._num_receivers = num_receivers
        self._manifest: Manifest = {}
        self._buckets: DeviceBuckets | None = None
        self._exports: list[list[dict[str, Any]]] | None = None

    def engine_started(self) -> None:
        """An export counts the one process that reads it: the next one gets its own."""
        self._exports = None

    def open(self, manifest: Manifest) -> None:
        """Reserve the buffers, when they are not those of the last update."""
        import torch

        if self._buckets is None or manifest != self._manifest:
            device = torch.device("cuda", torch.cuda.current_device())
            self._buckets = DeviceBuckets(manifest, self._bucket_bytes, device, ALIGNMENT_BYTES)
            self._manifest, self._exports = dict(manifest), None
        self._buckets.begin()

    def init_info(self) -> dict[str, Any]:
        """Both buffers' handles, for each receiver its own."""
        if self._exports is None:
            self._exports = [
                [_export(buffer).to_fields() for buffer in self._held.buffers]
                for _ in range(self._num_receivers)
            ]
        return {"exports": self._exports}

    def slot(self, name: str) -> "torch.Tensor":
        """The tensor's place in the bucket that is being filled."""
        return self._held.slot(name)

    def describe(self, bucket: Sequence[str]) -> dict[str, Any]:
        """Buffer, types, shapes and offsets, once the copies into the buffer are done."""
        import torch

        filled = self._held.cut(bucket)
        torch.cuda.current_stream().synchronize()
        infos = [self._manifest[name] for name in bucket]
        return {
            "names": list(bucket),
            "dtypes": [info.dtype for info in infos],
            "shapes": [list(info.shape) for info in infos],
            "offsets": list(filled.offsets),
            "buffer": filled.buffer,
        }

    def loaded(self, bucket: Sequence[str]) -> None:
        """The engine has copied what it keeps."""
        self._held.release(bucket)

    def close(self) -> None:
        """Free the buffers; the memory is given back once no engine reads it."""
        self._buckets, self._exports = None, None
        self._manifest = {}

    @property
    def _held(self) -> DeviceBuckets:
        assert self._buckets is not None, "open() comes first"
        return self._buckets


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raise EngineConfigError where torch's allocator is asked for expandable segments."""
    for variable in ALLOCATOR_VARIABLES:
        for setting in environment.get(variable, "").split(","):
            name, _, value = setting.partition(":")
            if name.strip().lower() == "expandable_segments" and value.strip().lower() == "true":
                raise _expandable(f"{variable} asks for them")


def _expandable(why: str) -> EngineConfigError:
    return EngineConfigError(
        f"bridge.transport cuda_ipc does not work with torch's expandable segments ({why}): they "
        "are mapped piece by piece and have no handle that another process can open. Remove "
        f"expandable_segments:True from {ALLOCATOR_VARIABLES[1]}, or use shared_memory or nccl"
    )


def _export(buffer: "torch.Tensor") -> CudaIpcHandle:
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    properties = torch.cuda.get_device_properties(buffer.device)
    return CudaIpcHandle.from_reduction(arguments, str(properties.uuid))
