# SPDX-License-Identifier: Apache-2.0
"""Cut the rows of a head into chunks, and walk them with one collective in flight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pdm.kernels.local_step import LocalStep
from pdm.kernels.reference import ReferenceStep
from pdm.kernels.tiled import TiledStep
from pdm.support import BehaviorSupport
from pdm.vocab_parallel.merge import MergedStatistics, PendingMerge
from pdm.vocab_parallel.shard import VocabShard

Implementation = Literal["auto", "reference", "tiled", "triton"]

# Scratch for the exponentials of the chunks in flight. Larger chunks read the head less often.
DEFAULT_CHUNK_BYTES = 256 * 1024**2
# A batch that is a little larger than a chunk stays in one: a second chunk, however small, reads
# the head and writes its gradient once more.
SINGLE_CHUNK_SLACK = 1.25


@dataclass(frozen=True)
class HeadSettings:
    """How to walk the head's rows.

    - ``temperature``: logits are divided by it
    - ``shard``: this rank's part of the vocabulary
    - ``chunk_size``: rows a chunk; None derives it from ``DEFAULT_CHUNK_BYTES``
    - ``impl``: which local step; "auto" is "triton" on CUDA and "tiled" elsewhere
    """

    temperature: float
    shard: VocabShard
    chunk_size: int | None = None
    impl: Implementation = "auto"


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk, its statistics over the whole vocabulary at hand."""

    rows: slice
    support: BehaviorSupport
    merged: MergedStatistics
    step: LocalStep


def row_slices(count: int, size: int) -> list[slice]:
    """Cut ``count`` rows into the fewest chunks of at most ``size``, as even as possible."""
    chunks = -(-count // size)
    bounds = [i * count // chunks for i in range(chunks + 1)] if chunks else [0]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def walk(
    hidden: Tensor, weight: Tensor, support: BehaviorSupport, settings: HeadSettings
) -> Iterator[Chunk]:
    """Yield the chunks in order; the next one's matrix product runs while this one is reduced.

    A chunk is to be used up before the next is asked for, since its scratch is used again.
    """
    shard = settings.shard
    weight = weight[: shard.true_width]
    owned = shard.owns(support.token_ids)
    columns = torch.where(owned, support.token_ids - shard.start, -1)
    in_flight = 1 if shard.group is None else 2
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    size = settings.chunk_size
    if size is None:
        size = _default_chunk_size(hidden.shape[0], weight.shape[0], dtype, in_flight)
    slices = row_slices(hidden.shape[0], size)
    scratch = _Scratch(settings, hidden.device, dtype, slices, weight.shape[0], in_flight)

    def start(number: int) -> tuple[LocalStep, PendingMerge]:
        step = scratch.step(number)
        rows = slices[number]
        local = step.statistics(hidden[rows], weight, columns[rows])
        return step, PendingMerge(local, shard)

    def finish(number: int, step: LocalStep, pending: PendingMerge) -> Chunk:
        rows = slices[number]
        part = support_rows(support, rows)
        return Chunk(rows, part, pending.finish(part), step)

    ahead: tuple[LocalStep, PendingMerge] | None = None
    for number in range(len(slices)):
        current = ahead or start(number)
        ahead = start(number + 1) if in_flight > 1 and number + 1 < len(slices) else None
        yield finish(number, *current)


def support_rows(support: BehaviorSupport, rows: slice | Tensor) -> BehaviorSupport:
    """Return the support of some of its tokens."""
    parts = {
        name: value[rows] if isinstance(value, Tensor) else value
        for name, value in vars(support).items()
    }
    return BehaviorSupport(**parts)


def sampled_column(support: BehaviorSupport, shard: VocabShard) -> Tensor:
    """Return the local column of each sampled token, -1 where another shard owns it."""
    return torch.where(shard.owns(support.sampled), support.sampled - shard.start, -1)


def deliver_weight_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    """Hand the weight's gradient to Megatron's buffer where there is one, else to autograd."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return gradient.to(weight.dtype)
    # DistributedDataParallel's hook adds .grad to main_grad unless told that it was done; None
    # instead of zeros would keep the hook from firing, and break overlapped reduction.
    main_grad.add_(gradient)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight)


def _default_chunk_size(count: int, width: int, dtype: torch.dtype, in_flight: int) -> int:
    size = max(1, DEFAULT_CHUNK_BYTES // (in_flight * max(width, 1) * dtype.itemsize))
    return max(count, 1) if count <= SINGLE_CHUNK_SLACK * size else size


class _Scratch:
    """Makes the steps, and hands their buffers round."""

    def __init__(
        self,
        settings: HeadSettings,
        device: torch.device,
        dtype: torch.dtype,
        slices: list[slice],
        width: int,
        in_flight: int,
    ) -> None:
        self._temperature = settings.temperature
        self._impl = settings.impl
        if self._impl == "auto":
            self._impl = "triton" if device.type == "cuda" else "tiled"
        largest = max((rows.stop - rows.start for rows in slices), default=0)
        count = min(in_flight, len(slices))
        self._buffers: list[Tensor] = []
        if self._impl != "reference":
            self._buffers = [
                torch.empty(largest * width, dtype=dtype, device=device) for _ in range(count)
            ]

    def step(self, number: int) -> LocalStep:
        if self._impl == "reference":
            return ReferenceStep(self._temperature)
        buffer = self._buffers[number % len(self._buffers)]
        if self._impl == "triton":
            from pdm.kernels.triton_step import TritonStep

            return TritonStep(self._temperature, buffer)
        return TiledStep(self._temperature, buffer)
