# SPDX-License-Identifier: Apache-2.0
"""Weights for an engine on other GPUs, broadcast by NCCL; of one node or of several.

What goes over the wire is the packed form of vLLM 0.32's `nccl` backend, so that a server with
nothing of ours installed can receive as well:

- The group has the trainer as rank 0 and the engine's workers from 1 on. It is named by a unique id
  that the trainer makes. Straight after joining, all ranks sum one float32: vLLM warms up with it.
- A bucket is announced by names, types in torch's words and shapes, in order. Its tensors follow
  each other without gaps, as bytes, in one broadcast from rank 0. vLLM would split a list that
  exceeds `packed_buffer_size_bytes`; it is set beyond any bucket, so that one list is one
  broadcast.
- vLLM reads a tensor in place, so it has to start at a multiple of its element's size.
"""

import base64
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import EngineDied, EngineTimeout
from .device_buckets import DeviceBuckets, FilledBucket
from .nccl_library import PATH_VARIABLE, NcclLibrary, check_same_version, loaded_library_path
from .weight_transport import NCCL_BACKEND, Manifest, WeightTransport

if TYPE_CHECKING:
    import torch

    from ..client.worker_handle import EngineInfo

JOIN_TIMEOUT_S = 120.0
# No bucket comes near, and it is an int64 for whoever reads it.
_NEVER_SPLIT_BYTES = 1 << 60


class NcclTransport(WeightTransport):
    """The sending half. Buffers, stream and group are on the current CUDA device."""

    backend = NCCL_BACKEND
    keeps_weights = False
    max_in_flight = 1

    def __init__(self, bucket_bytes: int, num_receivers: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._world_size = num_receivers + 1
        self._library = NcclLibrary(loaded_library_path())
        self._manifest: Manifest = {}
        self._buckets: DeviceBuckets | None = None
        self._filled: dict[tuple[str, ...], FilledBucket] = {}
        self._unique_id: bytes | None = None
        self._communicator: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def engine_environment(self) -> dict[str, str]:
        """Have the engine load the trainer's NCCL."""
        path = os.path.abspath(self._library.path) if "/" in self._library.path else None
        return {PATH_VARIABLE: path} if path else {}

    def check_engine(self, info: "EngineInfo") -> None:
        """Both ends must have the same NCCL."""
        check_same_version(self._library.version(), info.nccl_version, self._library.path)

    def engine_started(self) -> None:
        """A group dies with any of its members: the next process gets a new one."""
        self._leave()

    def open(self, manifest: Manifest) -> None:
        """Reserve the buffers, when they are not those of the last update."""
        import torch

        if self._buckets is None or manifest != self._manifest:
            device = torch.device("cuda", torch.cuda.current_device())
            self._buckets = DeviceBuckets(manifest, self._bucket_bytes, device, alignment=1)
            self._manifest = dict(manifest)
        self._buckets.begin()
        self._filled.clear()

    def init_info(self) -> dict[str, Any]:
        """What vLLM's backend needs to join."""
        if self._unique_id is None:
            self._unique_id = self._library.unique_id()
        return {
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(),
            "rank_offset": 1,
            "world_size": self._world_size,
            "packed": True,
            "packed_buffer_size_bytes": _NEVER_SPLIT_BYTES,
            "packed_num_buffers": 2,
        }

    def connect(self) -> None:
        """Join the group. A member that never comes would hang this rank in native code."""
        import torch

        assert self._unique_id is not None, "init_info() comes first"
        device, outcome = torch.cuda.current_device(), _Outcome()

        def join(unique_id: bytes) -> None:
            try:
                torch.cuda.set_device(device)  # each thread has its own
                outcome.communicator = self._library.join(unique_id, 0, self._world_size)
                self._warm_up(outcome.communicator)
            except BaseException as error:
                outcome.error = error

        thread = threading.Thread(
            target=join, args=(self._unique_id,), name="join-engine", daemon=True
        )
        thread.start()
        thread.join(JOIN_TIMEOUT_S)
        if thread.is_alive():
            raise EngineTimeout(
                f"the engine's {self._world_size - 1} workers did not join the NCCL group within "
                f"{JOIN_TIMEOUT_S:.0f} s: look at the engine's log; between nodes, at "
                "NCCL_SOCKET_IFNAME on both sides"
            )
        if outcome.error is not None:
            raise outcome.error
        self._communicator = outcome.communicator
        self._stream = torch.cuda.Stream()

    def slot(self, name: str) -> "torch.Tensor":
        """The tensor's place in the bucket that is being filled."""
        return self._held.slot(name)

    def describe(self, bucket: Sequence[str]) -> dict[str, Any]:
        """Names, types and shapes in the order of the bytes."""
        self._filled[tuple(bucket)] = self._held.cut(bucket)
        infos = [self._manifest[name] for name in bucket]
        return {
            "names": list(bucket),
            "dtype_names": [str(info.torch_dtype).removeprefix("torch.") for info in infos],
            "shapes": [list(info.shape) for info in infos],
        }

    def transmit(self, bucket: Sequence[str]) -> None:
        """Queue the broadcast behind the copies that filled the bucket."""
        import torch

        if self._communicator is None or self._stream is None:
            raise EngineDied("the NCCL group of the engine is gone: introduce the engine again")
        filled = self._filled[tuple(bucket)]
        self._stream.wait_stream(torch.cuda.current_stream())
        pointer = self._held.buffers[filled.buffer].data_ptr()
        self._library.broadcast_bytes(
            pointer, filled.num_bytes, 0, self._communicator, self._stream.cuda_stream
        )

    def loaded(self, bucket: Sequence[str]) -> None:
        """The engine has everything; so has the stream."""
        assert self._stream is not None
        self._stream.synchronize()
        del self._filled[tuple(bucket)]
        self._held.release(bucket)

    def close(self) -> None:
        """Leave the group and free the buffers."""
        self._leave()
        self._buckets = None
        self._manifest = {}

    def _warm_up(self, communicator: int) -> None:
        import torch

        one = torch.zeros(1, device="cuda")
        stream = torch.cuda.current_stream()
        self._library.sum_float32(one.data_ptr(), 1, communicator, stream.cuda_stream)
        stream.synchronize()

    def _leave(self) -> None:
        """Abort, not destroy: the other members may be gone, or hang in a broadcast."""
        communicator, self._communicator = self._communicator, None
        self._unique_id, self._stream = None, None
        if communicator is not None:
            self._library.abort(communicator)

    @property
    def _held(self) -> DeviceBuckets:
        assert self._buckets is not None, "open() comes first"
        return self._buckets


class _Outcome:
    communicator: int | None = None
    error: BaseException | None = None
