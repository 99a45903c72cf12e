# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the transports between GPUs; see `CheckpointReceiver` for what they share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_process_group,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from ..checkpoint_index import TensorInfo
from ..transfer.cuda_ipc_transport import CudaIpcHandle
from .weight_receiver import BucketUpdateInfo, CheckpointReceiver


class NcclReceiver(CheckpointReceiver):
    """Takes buckets in the packed form that `nccl_transport.py` describes."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    _group: Any = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group."""
        self.shutdown()
        self._group = worker_init_process_group(init_info, self.parallel_config)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Take one broadcast; its memory is new, since vLLM keeps tensors of unfinished layers."""
        if self._group is None:
            raise RuntimeError("init_weight_transfer_engine must be called before update_weights")
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(update_info.shapes, dtypes, strict=True)
        ]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._group.broadcast(packed, src=0)
        self.load(unpack_tensor(packed, update_info.names, update_info.shapes, dtypes, sizes))

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.destroy()
            self._group = None


@dataclass
class CudaIpcInitInfo(WeightTransferInitInfo):
    """For each worker of the engine, the handles of the trainer's buffers."""

    exports: list[list[dict[str, Any]]]


@dataclass
class CudaIpcUpdateInfo(BucketUpdateInfo):
    """A bucket, and in which of the trainer's buffers it is."""

    buffer: int


class CudaIpcReceiver(CheckpointReceiver):
    """Maps the trainer's buffers, and copies out of them what vLLM may keep."""

    init_info_cls = CudaIpcInitInfo
    update_info_cls = CudaIpcUpdateInfo
    _buffers: tuple[torch.Tensor, ...] = ()

    def init_transfer_engine(self, init_info: CudaIpcInitInfo) -> None:
        """Map the buffers; what was mapped before is let go first."""
        self.shutdown()
        exports = init_info.exports
        rank = self.parallel_config.data_parallel_index * self.parallel_config.world_size
        rank += self.parallel_config.rank
        if rank >= len(exports):
            raise ValueError(f"handles for {len(exports)} workers, and this is number {rank}")
        handles = [CudaIpcHandle.from_fields(values) for values in exports[rank]]
        self._buffers = tuple(
            rebuild_cuda_tensor(*handle.rebuild_arguments(_device_of(handle.device_uuid)))
            for handle in handles
        )

    def receive_weights(self, update_info: CudaIpcUpdateInfo) -> None:
        """Load a bucket. The trainer fills the buffer again after the answer, hence the copies."""
        if not 0 <= update_info.buffer < len(self._buffers):
            raise RuntimeError("init_weight_transfer_engine must be called before update_weights")
        buffer = self._buffers[update_info.buffer]
        tensors = []
        for name, dtype, shape, offset in zip(
            update_info.names,
            update_info.dtypes,
            update_info.shapes,
            update_info.offsets,
            strict=True,
        ):
            info = TensorInfo(dtype, tuple(shape))
            if offset < 0 or offset + info.num_bytes > len(buffer):
                raise ValueError(f"{name} lies outside of the trainer's buffer")
            part = buffer[offset : offset + info.num_bytes]
            copy = part.to(self.device, copy=True)  # from another GPU where the trainer is there
            tensors.append((name, copy.view(info.torch_dtype).view(info.shape)))
        self.load(tensors)

    def shutdown(self) -> None:
        """Let go of the trainer's memory."""
        self._buffers = ()


def _device_of(uuid: str) -> int:
    """Which of this process's GPUs has this name."""
    visible = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    if uuid not in visible:
        raise ValueError(
            f"the trainer's buffer is on GPU {uuid}, and this engine sees {visible}: "
            "bridge.transport cuda_ipc is for an engine on the trainer's GPUs; use nccl for others"
        )
    return visible.index(uuid)
