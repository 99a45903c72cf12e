# SPDX-License-Identifier: Apache-2.0
"""Policy statistics straight from hidden states and the head's weight, never a [T, V] tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pdm.kernels.local_step import RowGradient, WeightGradient
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport
from pdm.vocab_parallel.chunks import (
    HeadSettings,
    Implementation,
    deliver_weight_gradient,
    sampled_column,
    support_rows,
    walk,
)
from pdm.vocab_parallel.shard import VocabShard


def linear_policy_statistics(
    hidden: Tensor,
    weight: Tensor,
    support: BehaviorSupport,
    *,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    entropy_gradient: bool = False,
    chunk_size: int | None = None,
    impl: Implementation = "auto",
) -> PolicyStatistics:
    """Compute the statistics of pi = softmax(hidden weight^T / temperature), chunk by chunk.

    The same numbers as ``policy_statistics(hidden @ weight.T, ...)`` in float32 (float64 for
    float64 inputs), with C x V floats of scratch for chunks of C rows. Over shards: one all-gather
    of S + 5 floats a token and rank.

    Shapes: ``hidden`` [T, H]; ``weight`` [V, H], this rank's rows when ``shard`` is given, padding
    included; ``support`` for the same T tokens.

    Gradient: ``log_prob`` (and ``entropy`` if ``entropy_gradient``) towards ``hidden`` and
    ``weight``, by computing the logits again in backward. Over shards the gradient of ``hidden`` is
    this rank's part of a sum that the caller reduces, as for any column-parallel layer.

    Edge cases: those of ``policy_statistics``; T = 0 is fine. Wrong shapes raise ``ValueError``.

    Source: predictive divergence masks, Eq. 1, 5, 20.
    """
    settings = head_settings(hidden, weight, support, temperature, shard, chunk_size, impl)
    outputs: tuple[Tensor, ...] = _LinearStatistics.apply(  # type: ignore[no-untyped-call]
        hidden, weight, support, settings, entropy_gradient
    )
    log_prob, entropy, support_log_probs, tail_prob, sum_square, tail_sum_square, tail_max = outputs
    return PolicyStatistics(
        log_prob=log_prob,
        support_log_probs=support_log_probs,
        tail_prob=tail_prob,
        sum_square=sum_square,
        tail_sum_square=tail_sum_square,
        tail_max=tail_max,
        entropy=entropy,
        vocab_size=settings.shard.vocab_size,
    )


def head_settings(
    hidden: Tensor,
    weight: Tensor,
    support: BehaviorSupport,
    temperature: float,
    shard: VocabShard | None,
    chunk_size: int | None,
    impl: Implementation,
) -> HeadSettings:
    """Check the arguments that all linear functions share, and settle their defaults."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [T, H] and weight [V, H], got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if support.sampled.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected the support of {hidden.shape[0]} tokens, like hidden, got "
            f"{tuple(support.sampled.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"expected a positive temperature, got {temperature}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"expected a chunk_size of at least 1, got {chunk_size}")
    shard = shard or VocabShard(0, weight.shape[0], weight.shape[0])
    if shard.width != weight.shape[0]:
        raise ValueError(
            f"the shard holds {shard.width} rows of the head, weight has {weight.shape[0]}"
        )
    return HeadSettings(temperature, shard, chunk_size, impl)


def concatenate_statistics(parts: Sequence[PolicyStatistics]) -> PolicyStatistics:
    """Join the statistics of consecutive chunks, of which there is at least one."""
    joined: dict[str, Any] = {"vocab_size": parts[0].vocab_size}
    for field in dataclasses.fields(PolicyStatistics):
        if field.name != "vocab_size":
            joined[field.name] = torch.cat([getattr(part, field.name) for part in parts])
    return PolicyStatistics(**joined)


class _LinearStatistics(torch.autograd.Function):
    """Forward keeps one float a token; backward walks the chunks again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        support: BehaviorSupport,
        settings: HeadSettings,
        entropy_gradient: bool,
    ) -> tuple[Tensor, ...]:
        parts = [chunk.merged for chunk in walk(hidden, weight, support, settings)]
        if parts:
            stats = concatenate_statistics([part.statistics for part in parts])
        else:
            stats = empty_statistics(hidden, support, settings)
        ctx.save_for_backward(hidden, weight)
        ctx.support, ctx.settings = support, settings
        ctx.entropy_gradient = entropy_gradient
        rest = (
            stats.support_log_probs,
            stats.tail_prob,
            stats.sum_square,
            stats.tail_sum_square,
            stats.tail_max,
        )
        ctx.mark_non_differentiable(*rest, *(() if entropy_gradient else (stats.entropy,)))
        return (stats.log_prob, stats.entropy, *rest)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor, *unused: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        active = grad_log_prob != 0
        if ctx.entropy_gradient:
            active = active | (grad_entropy != 0)
        # Only rows with a gradient are computed again: what a mask left out costs nothing here.
        rows = active.nonzero().squeeze(-1)
        support = support_rows(ctx.support, rows)
        partial = hidden.new_zeros(len(rows), hidden.shape[1], dtype=dtype)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = WeightGradient(weight, settings.shard.true_width, dtype)
        for chunk in walk(hidden[rows], weight, support, settings):
            gradient = RowGradient(
                log_normalizer=chunk.merged.log_normalizer,
                coefficient=grad_log_prob[rows][chunk.rows],
                sampled_column=sampled_column(chunk.support, settings.shard),
                entropy_coefficient=(
                    grad_entropy[rows][chunk.rows] if ctx.entropy_gradient else None
                ),
                entropy=chunk.merged.statistics.entropy,
            )
            chunk.step.add_gradient(gradient, partial[chunk.rows], weight_grad)
        hidden_grad = torch.zeros_like(hidden).index_copy_(0, rows, partial.to(hidden.dtype))
        delivered = None
        if weight_grad is not None:
            delivered = deliver_weight_gradient(weight, weight_grad.finish())
        return hidden_grad, delivered, None, None, None


def empty_statistics(
    hidden: Tensor, support: BehaviorSupport, settings: HeadSettings
) -> PolicyStatistics:
    """Return the statistics of no tokens."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    none = hidden.new_zeros(0, dtype=dtype)
    columns = none.new_zeros(support.token_ids.shape)
    return PolicyStatistics(
        none, columns, none, none, none, none, none.clone(), settings.shard.vocab_size
    )
