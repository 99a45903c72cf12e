# SPDX-License-Identifier: Apache-2.0
"""In which form weights travel to an engine: its own type, or block FP8 with scales."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..checkpoint_index import SAFETENSORS_DTYPES, SCALE_SUFFIX, CheckpointIndex, TensorInfo
from ..errors import EngineConfigError
from .digests import tensor_digest

if TYPE_CHECKING:
    import torch

    from megatron.rl.weights.block_fp8 import BlockFP8


@dataclass(frozen=True)
class WeightFormat:
    """How a checkpoint's tensors are packed for one engine.

    dtype          the engine's type, in torch's words: "float32", "bfloat16" or "float16". Fewer
                   bytes travel, and rounding is the engine's own (to nearest, ties to even)
    quantization   "block_fp8": linear layers travel as e4m3 with the scales of 128 x 128 blocks
    scales         how those are chosen, see `BlockFP8`
    """

    dtype: str
    quantization: Literal["none", "block_fp8"] = "none"
    scales: Literal["power_of_two", "float32"] = "power_of_two"

    def manifest(self, index: CheckpointIndex) -> dict[str, TensorInfo]:
        """Everything that travels, in its own type: scales come right behind their weight."""
        manifest: dict[str, TensorInfo] = {}
        for name, info in index.tensors.items():
            for part in self.parts(name):
                manifest[part] = self._info(name, part, info)
        return manifest

    def parts(self, name: str) -> tuple[str, ...]:
        """The names under which one tensor of the checkpoint travels."""
        if not self.quantizes(name):
            return (name,)
        return (name, name + SCALE_SUFFIX)

    def quantizes(self, name: str) -> bool:
        """Whether this tensor travels in FP8."""
        if self.quantization == "none":
            return False
        from megatron.rl.weights.block_fp8 import is_quantized

        return is_quantized(name)

    def pack(
        self, name: str, tensor: "torch.Tensor", slots: Mapping[str, "torch.Tensor"]
    ) -> Mapping[str, "torch.Tensor"]:
        """Write a tensor into the slots of its parts, unless it is there already.

        Returns the parts as they travel, on the tensor's device: a GPU digests its own faster.
        """
        if self.quantizes(name):
            from megatron.rl.weights.block_fp8 import QuantizedWeight, quantize_weight

            data, scales = (slots[part] for part in self.parts(name))
            if data.device == tensor.device:
                quantize_weight(tensor, self._fp8, QuantizedWeight(data, scales), name=name)
                return slots
            made = quantize_weight(tensor, self._fp8, name=name)
            data.copy_(made.data)
            scales.copy_(made.scale_inv)
            return dict(zip(self.parts(name), (made.data, made.scale_inv), strict=True))
        slot, source = slots[name], tensor.detach()
        if slot.data_ptr() == source.data_ptr() and slot.dtype == source.dtype:
            return slots
        if slot.device != source.device:
            source = source.to(slot.dtype)
            slot.copy_(source)
            return {name: source}
        slot.copy_(source)
        return slots

    def digest(self, name: str, parts: Mapping[str, "torch.Tensor"]) -> int | None:
        """Digest of what the engine must hold, from what `pack` returned: of FP8, the values.

        None for tensors that were in FP8 already, whose data and scales come apart.
        """
        if not self.quantizes(name):
            in_fp8 = parts[name].dtype.itemsize == 1 or name.endswith(SCALE_SUFFIX)
            return None if in_fp8 else tensor_digest(parts[name])
        import torch

        from megatron.rl.weights.block_fp8 import dequantize_weight

        data, scales = (parts[part] for part in self.parts(name))
        return tensor_digest(dequantize_weight(data, scales, getattr(torch, self.dtype)))

    @property
    def _fp8(self) -> "BlockFP8":
        from megatron.rl.weights.block_fp8 import BlockFP8

        return BlockFP8(self.scales)

    def _info(self, name: str, part: str, info: TensorInfo) -> TensorInfo:
        if self.quantizes(name):
            if info.is_float8:
                raise EngineConfigError(
                    f"{name} is {info.dtype} in the engine's checkpoint already: set quantization "
                    'to "none", or start from a checkpoint in bfloat16'
                )
            from megatron.rl.weights.block_fp8 import scale_shape

            return (
                TensorInfo(SAFETENSORS_DTYPES["float8_e4m3fn"], info.shape)
                if part == name
                else TensorInfo(SAFETENSORS_DTYPES["float32"], scale_shape(info.shape))
            )
        keeps_type = info.is_float8 or name.endswith(SCALE_SUFFIX) or not info.is_floating_point
        return info if keeps_type else TensorInfo(SAFETENSORS_DTYPES[self.dtype], info.shape)
