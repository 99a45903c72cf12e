# SPDX-License-Identifier: Apache-2.0
"""How weights get from a trainer process into an engine: one small interface, several transports.

One update, seen from the trainer's engine client (`weight_update.py` drives it):

    open(manifest)                       where everything will be; memory is kept between updates
    [init_info(), connect()]             once per engine process, and when the memory changed
    slot(name) ... slot(name)            the caller writes each tensor into its slot
    describe(bucket), transmit(bucket)   a bucket is full: it is announced to the engine, then sent
    loaded(bucket)                       the engine has read it
    finish()                             the engine has read everything

On the engine's side each transport is a weight-transfer backend of vLLM, driven by vLLM's own
`init_weight_transfer_engine`, `start_weight_update`, `update_weights` and `finish_weight_update`.
What crosses the Unix socket is JSON fields, never a pickle.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..checkpoint_index import TensorInfo
from ..errors import EngineConfigError
from .weights_buffer import WeightsBuffer

if TYPE_CHECKING:
    import torch

    from ..client.worker_handle import EngineInfo

# The names that vllm_plugin.py registers with vLLM.
SHARED_MEMORY_BACKEND = "pdm_shared_memory"
CUDA_IPC_BACKEND = "pdm_cuda_ipc"
NCCL_BACKEND = "pdm_nccl"

TRANSPORTS = ("shared_memory", "cuda_ipc", "nccl")

Manifest = Mapping[str, TensorInfo]


class WeightTransport(ABC):
    """The sending half of a transport; one object serves one engine, over its restarts.

    backend        the weight-transfer backend of vLLM that receives
    keeps_weights  True: the slots hold the whole last update until the next `open`, so that a
                   restarted engine can be given it again. False: slots are reused within an
                   update, and after a restart the trainer has to update again
    max_in_flight  buckets that may wait for the engine's answer while another is filled
    """

    backend: ClassVar[str]
    keeps_weights: ClassVar[bool]
    max_in_flight: ClassVar[int] = 4

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vllm.LLM that this transport needs, as JSON can carry them."""
        return {"weight_transfer_config": {"backend": self.backend}}

    def engine_environment(self) -> dict[str, str]:
        """Environment variables that the engine's process needs."""
        return {}

    def check_engine(self, info: "EngineInfo") -> None:
        """Raise EngineConfigError where this transport cannot work with a started engine."""
        return

    def engine_started(self) -> None:
        """A new engine process has taken the place of the one that was connected, if any."""
        return

    @abstractmethod
    def open(self, manifest: Manifest) -> None:
        """Make room for an update of these tensors, in the types in which they travel.

        A second call with the same manifest keeps the memory, and what `init_info` said.
        """

    @abstractmethod
    def init_info(self) -> dict[str, Any]:
        """What the engine's backend needs to know once, after `open`: JSON fields.

        The same until the memory changes or `engine_started` is called.
        """

    def connect(self) -> None:
        """Meet the engine; called when it has been given `init_info` and not yet answered."""
        return

    @abstractmethod
    def slot(self, name: str) -> "torch.Tensor":
        """Where to put this tensor: contiguous, with the manifest's type and shape."""

    @abstractmethod
    def describe(self, bucket: Sequence[str]) -> dict[str, Any]:
        """The `update_info` with which the engine finds the tensors of a full bucket.

        Names of a bucket are in the order in which they were filled. vLLM holds on to the tensors
        that it is given until the whole layer has arrived, so their memory may only be reused
        when a layer never spans two buckets or the receiver copies them.
        """

    def transmit(self, bucket: Sequence[str]) -> None:
        """Move the bytes, for transports where the engine cannot just read them."""
        return

    def loaded(self, bucket: Sequence[str]) -> None:
        """The engine has answered for this bucket."""
        return

    def finish(self) -> None:
        """The engine has answered for the whole update."""
        return

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Safe to call twice."""


class SharedMemoryTransport(WeightTransport):
    """A buffer in memory that the engine maps: nothing is copied between the processes."""

    backend = SHARED_MEMORY_BACKEND
    keeps_weights = True

    def __init__(self) -> None:
        self._manifest: Manifest = {}
        self._buffer: WeightsBuffer | None = None

    def open(self, manifest: Manifest) -> None:
        """Lay the tensors out, in a new buffer when they are not those of the last update."""
        if self._buffer is not None and manifest is self._manifest:
            return  # at once: this is called for every tensor, of which there are thousands
        if self._buffer is None or manifest != self._manifest:
            self.close()
            self._buffer = WeightsBuffer(manifest)
            self._manifest = manifest

    def init_info(self) -> dict[str, Any]:
        """Which file the engine maps."""
        return {"path": self._held.path, "num_bytes": self._held.num_bytes}

    def slot(self, name: str) -> "torch.Tensor":
        """The tensor's place in the buffer."""
        return self._held.tensor(name)

    def describe(self, bucket: Sequence[str]) -> dict[str, Any]:
        """Type, shape and offset of each tensor."""
        return {
            "names": list(bucket),
            "dtypes": [self._manifest[name].dtype for name in bucket],
            "shapes": [list(self._manifest[name].shape) for name in bucket],
            "offsets": [self._held.offset(name) for name in bucket],
        }

    def close(self) -> None:
        """Free the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
            self._manifest = {}

    @property
    def _held(self) -> WeightsBuffer:
        assert self._buffer is not None, "open() comes first"
        return self._buffer


def make_transport(kind: str, *, bucket_bytes: int, num_receivers: int) -> WeightTransport:
    """The transport of this name, as in `VLLMEngineConfig.transport`.

    Args:
        bucket_bytes: a bucket is full when it holds at least this much.
        num_receivers: workers of the engine, each of which takes all weights.
    """
    if kind == "shared_memory":
        return SharedMemoryTransport()
    if kind == "cuda_ipc":
        from .cuda_ipc_transport import CudaIpcTransport

        return CudaIpcTransport(bucket_bytes, num_receivers)
    if kind == "nccl":
        from .nccl_transport import NcclTransport

        return NcclTransport(bucket_bytes, num_receivers)
    raise EngineConfigError(f"transport must be one of {TRANSPORTS}, got {kind!r}")
