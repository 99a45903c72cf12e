# SPDX-License-Identifier: Apache-2.0
"""The engine's end of a weight update: buckets of checkpoint tensors become vLLM's parameters.

vLLM creates a receiver in each of its workers and drives it: start, any number of buckets, finish.
In between its layerwise reload is at work: a layer's tensors are collected until all of them have
come, then loaded into memory of the checkpoint's layout, processed as after the first load, and
copied over the old parameters. A layer may span buckets. What every transport shares is in
`CheckpointReceiver`; one that differs in how tensors arrive derives from it.
"""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..checkpoint_index import TensorInfo
from ..transfer.weights_buffer import map_tensor
from .fp8_door import Dequantizer, NamedTensor
from .moe_reload_patch import install_moe_reload_patch
from .tied_heads import TiedHead, find_tied_heads

# Parameters that are computed from others or keep their default when a checkpoint has none.
_CHECKPOINT_SUFFIXES = (".weight", "_weight", ".bias", "weight_scale_inv")


class CheckpointReceiver(WeightTransferEngine):
    """Loads checkpoint tensors bucket by bucket, and sees to it that every parameter gets some."""

    _expected: set[str]
    _door: Dequantizer | None
    _tied_heads: list[TiedHead]

    def start_weight_update(self) -> None:
        """Put every layer back into the checkpoint's layout, ready to collect its tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        install_moe_reload_patch()
        self._tied_heads = find_tied_heads(self.model)
        initialize_layerwise_reload(self.model)
        self._expected = {
            name for name, _ in self.model.named_parameters() if name.endswith(_CHECKPOINT_SUFFIXES)
        }
        # The reload takes tied parameters apart; a checkpoint holds them once.
        self._expected -= {head.weight_name for head in self._tied_heads}
        is_fp8 = self.vllm_config.quant_config is not None
        self._door = None if is_fp8 else Dequantizer(self.model_config.dtype)

    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Load the tensors of one bucket."""
        if self._door is not None:
            tensors = self._door(tensors)
        loaded = self.model.load_weights(tensors)
        if loaded is None:
            raise RuntimeError(
                f"{type(self.model).__name__} does not say which parameters it has loaded, so an "
                "update of it cannot be checked"
            )
        self._expected.difference_update(loaded)

    def finish_weight_update(self) -> None:
        """Process what is left, after checking that nothing keeps its old values.

        vLLM itself only logs a warning when a parameter received nothing.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._door is not None:
            self._door.check_empty()
        if self._expected:
            raise RuntimeError(
                f"{len(self._expected)} parameters of the model received no weights, first "
                f"{sorted(self._expected)[:4]}: the checkpoint's names do not cover the model"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        for head in self._tied_heads:
            head.repack()


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """The file that holds the weights, as this process can open it."""

    path: str
    num_bytes: int


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """Where the tensors of a bucket are in the trainer's memory; types in safetensors' words."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]

    def __post_init__(self) -> None:
        counts = {len(self.names), len(self.dtypes), len(self.shapes), len(self.offsets)}
        if len(counts) != 1:
            raise ValueError(f"a bucket's lists must have equal lengths, got {sorted(counts)}")


class SharedMemoryReceiver(CheckpointReceiver):
    """Maps the trainer's buffer and loads from there; no bytes are copied in between."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = BucketUpdateInfo
    _map: mmap.mmap | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Map the file, read-only, so that a restart finds it as the trainer wrote it."""
        file = os.open(init_info.path, os.O_RDONLY)
        try:
            self._map = mmap.mmap(file, init_info.num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a bucket. (vLLM's own version then waits for an accelerator, which a CPU lacks.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Load a bucket, and let a GPU finish reading before the memory may be reused."""
        if self._map is None:
            raise RuntimeError("init_weight_transfer_engine must be called before update_weights")
        mapped = self._map
        infos = zip(update_info.dtypes, update_info.shapes, strict=True)
        self.load(
            (name, map_tensor(mapped, TensorInfo(dtype, tuple(shape)), offset))
            for name, (dtype, shape), offset in zip(
                update_info.names, infos, update_info.offsets, strict=True
            )
        )
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Let go of the trainer's memory."""
        self._map = None
