# SPDX-License-Identifier: Apache-2.0
"""The door of an engine that cannot compute in FP8: what comes in FP8 goes on in its own type."""

from collections.abc import Iterable, Iterator

import torch

from megatron.rl.weights.block_fp8 import dequantize_weight

from ..checkpoint_index import SCALE_SUFFIX

NamedTensor = tuple[str, torch.Tensor]


class Dequantizer:
    """Turns block FP8 back into a wider type, tensor by tensor.

    Weights in e4m3 become the engine's type when their scales are there; anything else passes. The
    error of the quantised weights is then real, only the products are more precise.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._waiting: dict[str, torch.Tensor] = {}

    def __call__(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Pass tensors on in the engine's type; a weight waits for its scales, or they for it."""
        for name, tensor in tensors:
            is_scale = name.endswith(SCALE_SUFFIX)
            if not is_scale and tensor.dtype != torch.float8_e4m3fn:
                yield name, tensor
                continue
            weight_name = name.removesuffix(SCALE_SUFFIX)
            partner = weight_name if is_scale else weight_name + SCALE_SUFFIX
            other = self._waiting.pop(partner, None)
            if other is None:
                self._waiting[name] = tensor
                continue
            data, scale = (other, tensor) if is_scale else (tensor, other)
            yield weight_name, dequantize_weight(data, scale, self._dtype)

    def check_empty(self) -> None:
        """Raise when a weight or its scales stayed alone."""
        if self._waiting:
            raise RuntimeError(f"FP8 weights or scales without the other: {sorted(self._waiting)}")
