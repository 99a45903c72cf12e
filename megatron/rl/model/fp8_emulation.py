# SPDX-License-Identifier: Apache-2.0
"""Blockwise FP8 products on any device: the operands are rounded to FP8, the products are float32.

Transformer Engine's Float8BlockScaling computes all three products of a linear layer from FP8
operands, each quantised from the tensor in high precision, along the dimension that is summed:

    Y  = q(X) q2(W)^T          X: 1 x 128 along features;  W: 128 x 128
    dX = q(dY) q2(W)           dY: 1 x 128 along features; W as in the forward pass
    dW = q(dY^T) q(X^T)^T      both: 1 x 128 along tokens

Here the operands are dequantised again and multiplied in float32, so that what remains different
from the GPU is the order of the sums. The gradient goes straight through the rounding, to the
parameter in its own precision. The quantiser is the weight bridge's (``weights/block_fp8.py``):
q2(W) is what the engine is sent.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.rl.errors import UserError
from megatron.rl.model.fp8 import FP8Settings
from megatron.rl.weights.block_fp8 import (
    QUANTIZED_DTYPE,
    BlockFP8,
    dequantize_activation,
    dequantize_weight,
    quantize_activation,
    quantize_weight,
)

GRADIENT_DTYPES = {"e4m3": QUANTIZED_DTYPE, "hybrid": torch.float8_e5m2}


@dataclass(frozen=True)
class BlockwiseRecipe:
    """How operands are rounded: the scales of blocks, and the type of gradients."""

    blocks: BlockFP8
    gradient_dtype: torch.dtype = QUANTIZED_DTYPE


def emulated_recipe(settings: FP8Settings) -> BlockwiseRecipe:
    """Return what emulates these settings.

    Raises:
        UserError: they cannot be emulated.
    """
    if settings.recipe != "blockwise":
        raise UserError(
            f"model.fp8 is {settings.recipe}, but run.device cpu emulates blockwise only; set "
            "model.fp8 to blockwise or none"
        )
    if settings.params:
        raise UserError(
            "model.fp8_params is true, which run.device cpu does not emulate; set it to false"
        )
    return BlockwiseRecipe(BlockFP8(settings.scales), GRADIENT_DTYPES[settings.format])


def round_weight(weight: Tensor, recipe: BlockwiseRecipe) -> Tensor:
    """Return the weight that products see: [N, K] float32, rounded in 128 x 128 blocks."""
    quantized = quantize_weight(weight, recipe.blocks)
    return dequantize_weight(quantized.data, quantized.scale_inv)


def round_rows(x: Tensor, recipe: BlockwiseRecipe, dtype: torch.dtype = QUANTIZED_DTYPE) -> Tensor:
    """Return [T, K] in float32, rounded in blocks of 128 along K."""
    quantized = quantize_activation(x, recipe.blocks, dtype)
    return dequantize_activation(quantized.data, quantized.scale_inv)


class BlockwiseLinear(torch.autograd.Function):
    """``x @ weight.T`` and its gradients, through FP8 operands; see the module.

    Shapes: x [T, K], weight [N, K] -> [T, N], all of one type, float32 or bfloat16. T may be 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: BlockwiseRecipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return (round_rows(x, recipe) @ round_weight(weight, recipe).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipe: BlockwiseRecipe = ctx.recipe
        (gradient,) = gradients
        dx = dw = None
        if ctx.needs_input_grad[0]:
            rows = round_rows(gradient, recipe, recipe.gradient_dtype)
            dx = (rows @ round_weight(weight, recipe)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            if x.size(0) == 0:  # an expert that no token chose
                dw = torch.zeros_like(weight)
            else:
                columns = round_rows(gradient.t(), recipe, recipe.gradient_dtype)
                dw = (columns @ round_rows(x.t(), recipe).t()).to(weight.dtype)
        return dx, dw, None
