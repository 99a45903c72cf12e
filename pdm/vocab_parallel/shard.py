# SPDX-License-Identifier: Apache-2.0
"""One rank's slice of the vocabulary, and the only two collectives of the statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabShard:
    """The columns [start, stop) of a vocabulary that is split over the ranks of ``group``.

    ``vocab_size`` is the *true* size. Tensor parallelism pads the vocabulary to a multiple of the
    number of ranks; columns with an id at or above ``vocab_size`` are padding, take no part in
    any statistic, and get a gradient of 0. ``group=None`` means that the vocabulary is not split
    (it does not mean the default group), and nothing is communicated.

    Edge cases: a shard may be empty, or hold padding only; it still takes part in every
    collective. A range that is not ordered, and a partial range without a group, raise
    ``ValueError``.
    """

    start: int
    stop: int
    vocab_size: int
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard: vocab_size must be at least 1, got {self.vocab_size}")
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"VocabShard: expected 0 <= start <= stop, got start={self.start}, stop={self.stop}"
            )
        if self.group is None and (self.start != 0 or self.stop < self.vocab_size):
            raise ValueError(
                "VocabShard: without a group the shard must hold the whole vocabulary "
                f"(start=0, stop >= vocab_size={self.vocab_size}), got start={self.start}, "
                f"stop={self.stop}; pass the tensor-parallel group"
            )

    @classmethod
    def for_rank(
        cls,
        vocab_size: int,
        padded_vocab_size: int,
        rank: int,
        world_size: int,
        group: ProcessGroup | None,
    ) -> VocabShard:
        """Build the shard of ``rank`` when ``padded_vocab_size`` is split evenly.

        The rank holds [rank * w, (rank + 1) * w) with w = padded_vocab_size / world_size.

        Errors: ``ValueError`` when the padded size does not divide, is below the true size, or
        when the rank is out of range.
        """
        if padded_vocab_size % world_size != 0:
            raise ValueError(
                f"VocabShard: padded_vocab_size={padded_vocab_size} is not a multiple of "
                f"world_size={world_size}; pad the vocabulary further"
            )
        if padded_vocab_size < vocab_size:
            raise ValueError(
                f"VocabShard: padded_vocab_size={padded_vocab_size} is below "
                f"vocab_size={vocab_size}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"VocabShard: rank must be in [0, {world_size}), got {rank}")
        width = padded_vocab_size // world_size
        return cls(rank * width, (rank + 1) * width, vocab_size, group)

    @property
    def width(self) -> int:
        """Number of local columns, padding included."""
        return self.stop - self.start

    @property
    def true_width(self) -> int:
        """Number of local columns that are tokens; they come first, padding after them."""
        return max(0, min(self.stop, self.vocab_size) - self.start)

    def owns(self, token_ids: Tensor) -> Tensor:
        """Which ``token_ids`` (any shape, int64) are tokens of this shard: bool, same shape."""
        return (token_ids >= self.start) & (token_ids < self.start + self.true_width)

    def in_vocabulary(self, token_ids: Tensor) -> Tensor:
        """Which ``token_ids`` (any shape, int64) are tokens of any shard: bool, same shape."""
        return (token_ids >= 0) & (token_ids < self.vocab_size)

    # The two reductions are plain: they carry no gradient, because none needs to travel. All that
    # comes after the SUM is computed from reduced tensors, alike on every rank, so the incoming
    # gradient of a sum is already the whole one on every rank (backward of the SUM is the
    # identity; a second all-reduce would multiply it by the number of ranks). The maximum only
    # shifts exponents and cancels from every value. The backward of the statistics is therefore
    # purely local.

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of ``values`` over the shards; a new tensor."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of ``values`` over the shards; a new tensor."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if values.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "VocabShard: reductions carry no gradient, got a tensor that requires one; "
                "reduce detached values and write the gradient out"
            )
        reduced = values.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            dist.all_reduce(reduced, op=operation, group=self.group)
        return reduced
