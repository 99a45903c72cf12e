# SPDX-License-Identifier: Apache-2.0
"""Megatron's tensor-parallel linear layers, multiplying through emulated block FP8.

Each rank quantises its own shard of the weight, as Transformer Engine does. Under sequence
parallelism activations are gathered before they are rounded: along features that is the same, and
along tokens it is what Transformer Engine does where a rank's tokens are not whole blocks.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron.rl.model.fp8_emulation import BlockwiseLinear, BlockwiseRecipe


def _multiply(
    x: Tensor,
    weight: Tensor,
    recipe: BlockwiseRecipe,
    *,
    bias: Tensor | None,
    sequence_parallel: bool,
    allreduce_dgrad: bool,
    tp_group: torch.distributed.ProcessGroup | None,
    **of_fused_kernels: object,
) -> Tensor:
    """Do what Megatron's ``linear_with_grad_accumulation_and_async_allreduce`` does.

    x [tokens, batch, K]; under sequence parallelism its first dimension is this rank's part.
    """
    if bias is not None:
        raise ValueError("emulated FP8 has no bias: no supported model has one in a linear layer")
    if sequence_parallel:
        x = gather_from_sequence_parallel_region(  # the gradient is reduce-scattered
            x, tensor_parallel_output_grad=True, group=tp_group
        )
    elif allreduce_dgrad:
        x = copy_to_tensor_model_parallel_region(x, group=tp_group)
    product: Tensor = BlockwiseLinear.apply(x.flatten(0, -2), weight, recipe)
    return product.unflatten(0, x.shape[:-1])


class BlockwiseColumnParallelLinear(ColumnParallelLinear):
    """Output features are sharded. ``recipe`` says how operands are rounded."""

    def __init__(self, *args: Any, recipe: BlockwiseRecipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recipe = recipe

    def _forward_impl(self, input: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return _multiply(input, weight, self._recipe, **how)


class BlockwiseRowParallelLinear(RowParallelLinear):
    """Input features are sharded. ``recipe`` says how operands are rounded."""

    def __init__(self, *args: Any, recipe: BlockwiseRecipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recipe = recipe

    def _forward_impl(self, input: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return _multiply(input, weight, self._recipe, **how)
