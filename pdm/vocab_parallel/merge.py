# SPDX-License-Identifier: Apache-2.0
"""Join the local statistics of all vocabulary shards: one all-gather, alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pdm.kernels.local_step import LocalStatistics
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport
from pdm.vocab_parallel.shard import VocabShard


class _Work(Protocol):
    def wait(self) -> object: ...


@dataclass(frozen=True, eq=False)
class MergedStatistics:
    """Statistics over the whole vocabulary, and log sum e^z, which the gradient needs."""

    statistics: PolicyStatistics
    log_normalizer: Tensor


class PendingMerge:
    """A chunk's statistics on their way: started at once, waited for when needed.

    One all-gather of S + 5 floats a token and rank. Gathering instead of reducing costs a few bytes
    more and one latency less than MAX and then SUM, and lets the next chunk's matrix product run
    meanwhile.
    """

    def __init__(self, local: LocalStatistics, shard: VocabShard) -> None:
        packed = local.pack()
        self._shard = shard
        self._work: _Work | None = None
        if shard.group is None:
            self._parts = packed.unsqueeze(0)
            return
        ranks = dist.get_world_size(shard.group)
        self._parts = packed.new_empty(ranks, *packed.shape)
        # gloo has no all_gather_into_tensor for uneven work; views of one tensor serve both.
        self._work = dist.all_gather(list(self._parts), packed, group=shard.group, async_op=True)

    def finish(self, support: BehaviorSupport) -> MergedStatistics:
        """Wait for the other shards and merge."""
        if self._work is not None:
            self._work.wait()
        return _merge(LocalStatistics.unpack(self._parts), support, self._shard.vocab_size)


def _merge(parts: LocalStatistics, support: BehaviorSupport, vocab_size: int) -> MergedStatistics:
    """Merge statistics with a leading dimension of shards."""
    known = (support.token_ids >= 0) & (support.token_ids < vocab_size)
    # Each support logit is owned by one shard; the others sent 0.
    support_logits = parts.support_logits.sum(dim=0)
    row_max = parts.row_max.amax(dim=0)
    shift = parts.row_max - row_max
    scale = shift.exp()
    tail = (parts.tail_sum * scale).sum(dim=0)
    tail_square = (parts.tail_square * scale.square()).sum(dim=0)
    shift = torch.where(scale == 0.0, 0.0, shift)  # an empty shard's is -inf
    weighted = ((parts.tail_weighted + parts.tail_sum * shift) * scale).sum(dim=0)

    centered = torch.where(known, support_logits - row_max.unsqueeze(-1), -torch.inf)
    exponential = centered.exp()
    # The largest term is exactly 1. Leaving it out and taking log1p of the rest keeps
    # log pi = -1e-12 apart from 0.
    top = exponential.argmax(dim=-1, keepdim=True)
    top_is_max = exponential.gather(-1, top).squeeze(-1) == 1.0
    others = exponential.scatter(-1, top, 0.0).sum(dim=-1)
    all_of_them = exponential.sum(dim=-1)
    excess = torch.where(top_is_max, others + tail, all_of_them + (tail - 1.0))
    log_z = torch.log1p(excess)
    normalizer = 1.0 + excess
    square = tail_square + exponential.square().sum(dim=-1)
    surprise = torch.where(exponential == 0.0, 0.0, centered)
    weighted = weighted + (exponential * surprise).sum(dim=-1)

    log_probs = centered - log_z.unsqueeze(-1)
    # An id that no shard owns has sent 0 from everywhere: it must not read as a logit.
    log_probs = torch.where(known | ~support.valid, log_probs, torch.nan)
    statistics = PolicyStatistics(
        log_prob=support.gather_sampled(log_probs),
        support_log_probs=log_probs,
        tail_prob=tail / normalizer,
        sum_square=square / normalizer.square(),
        tail_sum_square=tail_square / normalizer.square(),
        tail_max=(parts.tail_max * scale).amax(dim=0) / normalizer,
        entropy=log_z - weighted / normalizer,
        vocab_size=vocab_size,
    )
    return MergedStatistics(statistics, row_max + log_z)
