# SPDX-License-Identifier: Apache-2.0
"""What the method reads of the policy pi, per token, and its reference computation from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pdm.support import BehaviorSupport
from pdm.vocab_parallel.shard import VocabShard


@dataclass(frozen=True, eq=False)
class PolicyStatistics:
    """What divergences, directions and the loss need to know of the policy, per token.

    With pi = softmax(logits / temperature) over the true vocabulary of n tokens, and the support K
    of the behaviour policy:

    - ``log_prob`` [T]: log pi of the sampled token
    - ``support_log_probs`` [T, S]: log pi of each support column, -inf on unused columns
    - ``tail_prob`` [T]: sum of pi_j over j outside K
    - ``sum_square`` [T]: sum of pi_i^2 over the vocabulary
    - ``tail_sum_square`` [T]: sum of pi_j^2 over j outside K
    - ``tail_max`` [T]: max of pi_j over j outside K, 0 when nothing is outside
    - ``entropy`` [T]: -sum of pi_i log pi_i over the vocabulary, in nats
    - ``vocab_size``: n

    All tensors are float32, or float64 when the logits were. Tail quantities are summed over the
    tail itself; 1 - sum would lose every tail below 1e-7.

    Gradient: ``log_prob``, and ``entropy`` on request; everything else is detached.

    Source: predictive divergence masks, Eq. 5, 10, 11; the exact direction needs
    ``tail_sum_square``.
    """

    log_prob: Tensor
    support_log_probs: Tensor
    tail_prob: Tensor
    sum_square: Tensor
    tail_sum_square: Tensor
    tail_max: Tensor
    entropy: Tensor
    vocab_size: int


def policy_statistics(
    logits: Tensor,
    support: BehaviorSupport,
    *,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    entropy_gradient: bool = False,
) -> PolicyStatistics:
    """Compute the statistics of pi = softmax(logits / temperature), whole or over shards.

    log pi_i = z_i - m - log(sum_j exp(z_j - m)), with z = logits / temperature and m = max_j z_j;
    the tail sums run over the columns that are not in the support. Over shards: one MAX
    all-reduce of 2 floats per token and one SUM all-reduce of S + 6.

    Shapes: ``logits`` [T, V] of any float dtype, this rank's columns when ``shard`` is given;
    ``support`` for the same T tokens. The computation is float32, or float64 for float64 logits.

    Gradient: ``log_prob`` (and ``entropy`` if ``entropy_gradient``) carries
    d log pi_k / d logit_i = (1[i = k] - pi_i) / temperature and
    d H / d logit_i = -pi_i (log pi_i + H) / temperature; each rank gets the slice for its own
    columns without communication. A row whose incoming gradient is 0 gets exactly 0, whatever its
    logits hold. Second derivatives are refused.

    Edge cases: T = 0 and an empty shard are fine. Padded columns (ids >= ``shard.vocab_size``)
    count as -inf and get gradient 0. A logit of -inf is a token of probability 0. A NaN or +inf
    logit, or a row of only -inf, makes its token's statistics NaN. A support id at or above the
    vocabulary size reads NaN; so does ``log_prob`` where the support lacks the sampled token.
    Wrong shapes or dtypes and a temperature that is not positive raise ``ValueError``.

    Source: predictive divergence masks, Eq. 1, 5, 20.
    """
    if shard is None:
        shard = VocabShard(0, logits.shape[-1], logits.shape[-1]) if logits.dim() else None
    _check_arguments(logits, support, temperature, shard)
    assert shard is not None
    with torch.no_grad():
        scaled = _scaled_logits(logits, shard, temperature)
        in_tail = _tail_columns(scaled, support, shard)
        row_max, tail_row_max = _reduced_maxima(scaled, in_tail, shard)
        sums = _reduced_sums(scaled - row_max.unsqueeze(-1), in_tail, support, shard)
        statistics = _finish(sums, row_max, tail_row_max, support, shard)
    log_prob, entropy = _AttachGradient.apply(  # type: ignore[no-untyped-call]
        logits,
        statistics.log_prob,
        statistics.entropy,
        row_max,
        sums.log_normalizer,
        support.sampled,
        shard,
        temperature,
        entropy_gradient,
    )
    return PolicyStatistics(
        log_prob=log_prob,
        support_log_probs=statistics.support_log_probs,
        tail_prob=statistics.tail_prob,
        sum_square=statistics.sum_square,
        tail_sum_square=statistics.tail_sum_square,
        tail_max=statistics.tail_max,
        entropy=entropy,
        vocab_size=shard.vocab_size,
    )


@dataclass(frozen=True, eq=False)
class _ReducedSums:
    """Sums over the whole vocabulary, with c_i = z_i - m <= 0 and e_i = exp(c_i)."""

    excess: Tensor  # sum of e_i, minus 1
    square: Tensor  # sum of e_i^2
    tail: Tensor  # sum of e_j over the tail
    tail_square: Tensor  # sum of e_j^2 over the tail
    weighted: Tensor  # sum of e_i c_i
    support: Tensor  # c_i of the support columns [T, S]

    @property
    def normalizer(self) -> Tensor:
        return 1.0 + self.excess

    @property
    def log_normalizer(self) -> Tensor:
        return torch.log1p(self.excess)


def _scaled_logits(logits: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Widen to float32 or keep float64, divide by the temperature, -inf on padded columns."""
    # bf16 has 8 bits: a log-softmax in it is off by up to 0.07 nats over a large vocabulary.
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        scaled = scaled / temperature
    if shard.true_width < shard.width:
        padded = torch.arange(shard.width, device=scaled.device) >= shard.true_width
        scaled = scaled.masked_fill(padded, -torch.inf)
    return scaled


def _tail_columns(scaled: Tensor, support: BehaviorSupport, shard: VocabShard) -> Tensor:
    """Mark the local columns that are not in the support: [T, V] bool."""
    # One spare column takes the ids that are elsewhere, or nowhere, and is cut off again; so an
    # empty shard needs no special case.
    spare = shard.width
    local = torch.where(shard.owns(support.token_ids), support.token_ids - shard.start, spare)
    in_tail = torch.ones(
        (*scaled.shape[:-1], spare + 1), dtype=torch.bool, device=scaled.device
    ).scatter_(-1, local, False)
    return in_tail[..., :spare]


def _reduced_maxima(scaled: Tensor, in_tail: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Reduce max z over all columns and over the tail, in one collective: [T] and [T]."""
    if shard.width == 0:  # amax over no columns raises
        local = scaled.new_full((*scaled.shape[:-1], 2), -torch.inf)
    else:
        tail = torch.where(in_tail, scaled, -torch.inf)
        local = torch.stack([scaled.amax(dim=-1), tail.amax(dim=-1)], dim=-1)
    reduced = shard.all_reduce_max(local)
    return reduced[..., 0], reduced[..., 1]


def _reduced_sums(
    centered: Tensor, in_tail: Tensor, support: BehaviorSupport, shard: VocabShard
) -> _ReducedSums:
    """Reduce every sum over the vocabulary in one collective; ``centered`` is z - m, [T, V]."""
    exponential = centered.exp()
    tail = torch.where(in_tail, exponential, 0.0)
    # The largest e_i is exactly 1. Summing the others on their own and taking log1p keeps
    # log pi_k = -1e-12 apart from 0, where 1 + 1e-12 would round to 1.
    at_max = centered == 0.0
    parts = [
        torch.where(at_max, 0.0, exponential).sum(dim=-1),
        at_max.sum(dim=-1).to(centered.dtype),
        exponential.square().sum(dim=-1),
        tail.sum(dim=-1),
        tail.square().sum(dim=-1),
        (exponential * torch.where(exponential == 0.0, 0.0, centered)).sum(dim=-1),
    ]
    owned = shard.owns(support.token_ids)
    if shard.width == 0:
        picked = centered.new_zeros(owned.shape)
    else:
        local = torch.where(owned, support.token_ids - shard.start, 0)
        picked = torch.where(owned, centered.gather(-1, local), 0.0)
    packed = torch.cat([torch.stack(parts, dim=-1), picked], dim=-1)
    reduced = shard.all_reduce_sum(packed)
    below_max, count_max, square, tail_sum, tail_square, weighted = reduced[..., :6].unbind(-1)
    return _ReducedSums(
        excess=below_max + (count_max - 1.0),
        square=square,
        tail=tail_sum,
        tail_square=tail_square,
        weighted=weighted,
        support=reduced[..., 6:],
    )


def _finish(
    sums: _ReducedSums,
    row_max: Tensor,
    tail_row_max: Tensor,
    support: BehaviorSupport,
    shard: VocabShard,
) -> PolicyStatistics:
    """Turn reduced sums into statistics; the same arithmetic on every rank."""
    normalizer, log_normalizer = sums.normalizer, sums.log_normalizer
    support_log_probs = sums.support - log_normalizer.unsqueeze(-1)
    # An id that no shard owns contributed 0 to the sum, which would read as the most likely token.
    known = shard.in_vocabulary(support.token_ids)
    support_log_probs = torch.where(known, support_log_probs, torch.nan)
    support_log_probs = torch.where(support.valid, support_log_probs, -torch.inf)
    return PolicyStatistics(
        log_prob=support.gather_sampled(support_log_probs),
        support_log_probs=support_log_probs,
        tail_prob=sums.tail / normalizer,
        sum_square=sums.square / normalizer.square(),
        tail_sum_square=sums.tail_square / normalizer.square(),
        tail_max=(tail_row_max - row_max).exp() / normalizer,
        # Neither term is negative: log Z >= 0 since Z >= 1, and every c_i <= 0.
        entropy=log_normalizer - sums.weighted / normalizer,
        vocab_size=shard.vocab_size,
    )


class _AttachGradient(torch.autograd.Function):
    """Give log_prob and entropy their gradient towards the local logits.

    The values are computed already, so forward passes them through; backward writes out the closed
    form and recomputes pi from the logits. Compared with differentiating the forward, it keeps no
    [T, V] tensor alive but the logits, and leaves a row without incoming gradient at exactly 0
    even where its logits are NaN (0 * NaN would poison the whole weight gradient).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        log_prob: Tensor,
        entropy: Tensor,
        row_max: Tensor,
        log_normalizer: Tensor,
        sampled: Tensor,
        shard: VocabShard,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        log_prob, entropy = log_prob.clone(), entropy.clone()
        ctx.save_for_backward(logits, entropy, row_max, log_normalizer, sampled)
        ctx.shard = shard
        ctx.temperature = temperature
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, entropy, row_max, log_normalizer, sampled = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        scaled = _scaled_logits(logits, shard, ctx.temperature)
        # Subtract in two steps: m + log Z rounds log Z away where m is large.
        log_probs = (scaled - row_max.unsqueeze(-1)) - log_normalizer.unsqueeze(-1)
        probs = log_probs.exp()
        gradient = -probs * grad_log_prob.unsqueeze(-1)
        if shard.width > 0:
            owned = shard.owns(sampled)
            local = torch.where(owned, sampled - shard.start, 0).unsqueeze(-1)
            hit = torch.where(owned, grad_log_prob, 0.0).unsqueeze(-1)
            gradient.scatter_add_(-1, local, hit)
        has_gradient = grad_log_prob != 0
        if ctx.entropy_gradient:
            surprise = torch.where(probs == 0.0, 0.0, log_probs) + entropy.unsqueeze(-1)
            gradient -= probs * surprise * grad_entropy.unsqueeze(-1)
            has_gradient = has_gradient | (grad_entropy != 0)
        gradient = gradient / ctx.temperature
        gradient = torch.where(has_gradient.unsqueeze(-1), gradient, 0.0)
        gradient[..., shard.true_width :] = 0.0
        return (gradient.to(logits.dtype), *[None] * 8)


def _check_arguments(
    logits: Tensor, support: BehaviorSupport, temperature: float, shard: VocabShard | None
) -> None:
    if logits.dim() < 1 or not logits.is_floating_point() or shard is None:
        raise ValueError(
            "policy_statistics: logits must be a floating-point tensor [T, V], got "
            f"{logits.dtype} of shape {tuple(logits.shape)}"
        )
    if logits.shape[-1] != shard.width:
        raise ValueError(
            f"policy_statistics: the shard [{shard.start}, {shard.stop}) holds {shard.width} "
            f"columns, got logits with {logits.shape[-1]}; logits must be this rank's slice, not "
            "gathered"
        )
    if logits.shape[:-1] != support.sampled.shape:
        raise ValueError(
            f"policy_statistics: logits are for tokens of shape {tuple(logits.shape[:-1])}, got a "
            f"support for {tuple(support.sampled.shape)}"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"policy_statistics: temperature must be finite and above 0, got {temperature}"
        )
