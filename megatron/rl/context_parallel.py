# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a packed micro-batch a context-parallel rank holds.

Megatron and Transformer Engine cut every sequence into ``2 * size`` chunks of equal length and give
rank r the chunks r and ``2 * size - 1 - r``: early and late queries together, so that each rank
attends to about as many keys (rope_utils._get_thd_freqs_on_this_cp_rank). Here, and only here, this
order is written down; packing, the rotary embedding and the reference attention all read it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ContextShard:
    """This rank's place in the context-parallel group."""

    rank: int = 0
    size: int = 1

    @property
    def sequence_multiple(self) -> int:
        """Every sequence's length is padded to a multiple of this."""
        return 1 if self.size == 1 else 2 * self.size


def held_positions(cu_seqlens: Tensor, shard: ContextShard) -> Tensor:
    """Return which tokens of the whole micro-batch the rank holds, in the order it holds them.

    Shapes: ``cu_seqlens`` [B + 1] of the whole micro-batch, every length a multiple of
    ``shard.sequence_multiple`` -> int64 [T / size], ascending within each sequence.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if shard.size == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    chunk = lengths // (2 * shard.size)
    # Start of the rank's first chunk and of its second, within the micro-batch.
    first = starts + shard.rank * chunk
    second = starts + (2 * shard.size - 1 - shard.rank) * chunk
    begins = torch.stack([first, second], dim=1).flatten()
    sizes = chunk.repeat_interleave(2)
    held = int(cu_seqlens[-1]) // shard.size
    shift = begins - (sizes.cumsum(0) - sizes)
    return torch.arange(held, device=cu_seqlens.device) + shift.repeat_interleave(
        sizes, output_size=held
    )


def order_of_gathered(cu_seqlens: Tensor, size: int) -> Tensor:
    """Return where each token of the micro-batch lies among all ranks' tokens, joined by rank.

    Shapes: ``cu_seqlens`` [B + 1] -> int64 [T]; ``joined[order]`` is in the micro-batch's order.
    """
    held = torch.cat([held_positions(cu_seqlens, ContextShard(r, size)) for r in range(size)])
    return torch.empty_like(held).scatter_(0, held, torch.arange(held.numel(), device=held.device))
