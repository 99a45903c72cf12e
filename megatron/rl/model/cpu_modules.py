# SPDX-License-Identifier: Apache-2.0
"""Layer modules for CPU runs, where Transformer Engine does not exist.

Megatron's own local modules refuse what training needs: ``WrappedTorchNorm`` refuses sequence
parallelism (torch_norm.py:50), ``DotProductAttention`` refuses packed sequences
(dot_product_attention.py:152). Both replacements are plain PyTorch and keep float64, so that they
serve as oracles too.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.rl.context_parallel import ContextShard, held_positions, order_of_gathered
from megatron.rl.model.fp8_emulation import BlockwiseRecipe
from megatron.rl.model.fp8_linear import (
    BlockwiseColumnParallelLinear,
    BlockwiseRowParallelLinear,
)


class RMSNorm(torch.nn.Module):
    """RMS normalisation that tells Megatron to sum its weight gradient over sequence shards.

    ``y = x / sqrt(mean(x^2) + eps) * weight``, computed in float32 at least.

    Args:
        config: decides ``sequence_parallel``; with it each rank sees a slice of the tokens and
            ``finalize_model_grads`` all-reduces the gradients of parameters marked so.
        hidden_size: H, the size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class PackedAttention(torch.nn.Module):
    """Causal self-attention over packed sequences, block-diagonal by ``cu_seqlens``.

    Sequences are laid out as a right-padded batch; causality alone then keeps every real query
    from the padding, so that no mask is built. Grouped-query attention is native.

    Under context parallelism a rank has a part of every sequence (see ``context_parallel``): keys
    and values are gathered over the group (their gradient is reduce-scattered), queries stay.

    Shapes, T tokens of this rank: query ``[T, heads, d]``, key and value ``[T, groups, d]``
    (packed, ``qkv_format: thd``) -> ``[T, heads * d]``; or ``[s, b, heads, d]`` without packing
    -> ``[s, b, heads * d]``.

    Raises:
        ValueError: dropout, a mask type other than causal, or context parallelism without packed
            sequences is asked for.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused_groups: object,
    ) -> None:
        super().__init__()
        if config.attention_dropout != 0.0:
            raise ValueError(
                f"attention_dropout is {config.attention_dropout}, expected 0: dropout would make "
                "the policy differ from the one that the rollout engine sampled"
            )
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"only causal attention is supported, got {attn_mask_type}")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        if packed_seq_params is None:
            if group.size() > 1:
                raise ValueError(
                    f"context parallelism over {group.size()} ranks needs packed sequences "
                    "(packed_seq_params), got none"
                )
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            context = self._attend(q, k, v)  # [b, heads, s, d]
            return context.permute(2, 0, 1, 3).flatten(2)
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if group.size() > 1:
            return self._attend_over_ranks(query, key, value, cu_seqlens, group)
        slots, shape = _padded_slots(cu_seqlens, query.size(0))
        q, k, v = (_pad(x, slots, shape) for x in (query, key, value))
        context = self._attend(q, k, v).transpose(1, 2).flatten(0, 1)  # [b * s, heads, d]
        return context[slots].flatten(1)

    def _attend_over_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        group: torch.distributed.ProcessGroup,
    ) -> Tensor:
        size = group.size()
        # All-gather forward, reduce-scatter backward: each rank's queries add to every gradient.
        joined = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=1), tensor_parallel_output_grad=True, group=group
        )
        k, v = joined[order_of_gathered(cu_seqlens, size)].chunk(2, dim=1)
        positions = held_positions(cu_seqlens, ContextShard(group.rank(), size))
        slots, shape = _padded_slots(cu_seqlens // size, query.size(0))
        key_slots, key_shape = _padded_slots(cu_seqlens, k.size(0))
        # Within the padded batch of keys; a padded query looks at position 0 of its sequence.
        row = torch.zeros(shape[0] * shape[1], dtype=torch.int64, device=query.device)
        row[slots] = key_slots[positions] % key_shape[1]
        causal = torch.arange(key_shape[1], device=query.device) <= row.view(*shape, 1)
        context = self._attend(
            _pad(query, slots, shape),
            _pad(k, key_slots, key_shape),
            _pad(v, key_slots, key_shape),
            causal.unsqueeze(1),  # [b, 1, s / size, s]
        )
        return context.transpose(1, 2).flatten(0, 1)[slots].flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=q.size(1) != k.size(1),
        )


def _padded_slots(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, tuple[int, int]]:
    """Return where each packed token goes in the flattened padded batch ``[b * s]``, and (b, s)."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    longest = int(lengths.max())
    row_shift = torch.arange(len(lengths), device=cu_seqlens.device) * longest - cu_seqlens[:-1]
    slots = torch.arange(num_tokens, device=cu_seqlens.device)
    return slots + torch.repeat_interleave(row_shift, lengths, output_size=num_tokens), (
        len(lengths),
        longest,
    )


def _pad(x: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    """Scatter packed ``[T, heads, d]`` into ``[b, heads, s, d]``, zeros elsewhere."""
    padded = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, slots, x)
    return padded.unflatten(0, shape).transpose(1, 2)


class CPUSpecProvider(LocalSpecProvider):
    """Megatron's local layer modules, with the two replacements of this file.

    Args:
        fp8: linear layers round their operands so; None: they do not.
    """

    def __init__(self, fp8: BlockwiseRecipe | None = None) -> None:
        self._fp8 = fp8

    def column_parallel_linear(self) -> Callable[..., Any]:
        if self._fp8 is None:
            return super().column_parallel_linear()
        return partial(BlockwiseColumnParallelLinear, recipe=self._fp8)

    def row_parallel_linear(self) -> Callable[..., Any]:
        if self._fp8 is None:
            return super().row_parallel_linear()
        return partial(BlockwiseRowParallelLinear, recipe=self._fp8)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., Any]:
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(
                linear_fc1=self.column_parallel_linear(),
                linear_fc2=self.row_parallel_linear(),
                activation_func=self.activation_func(),
            ),
        )

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type[RMSNorm]:
        return RMSNorm

    def core_attention(self) -> type[PackedAttention]:
        return PackedAttention
