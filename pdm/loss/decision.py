# SPDX-License-Identifier: Apache-2.0
"""From a config to the tensors of the decision: divergence, direction and mask of every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdm.functional.certified_direction import certified_kl_direction
from pdm.functional.directions import (
    binary_kl_direction,
    binary_tv_direction,
    kl_direction,
    ratio_direction,
    tv_direction,
)
from pdm.functional.divergences import binary_kl, binary_tv, topk_kl, topk_tv
from pdm.functional.token_masks import MaskResult, divergence_mask, ratio_clip_mask
from pdm.loss.config import PolicyLossConfig, resolve_mask
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport


@dataclass(frozen=True, eq=False)
class Decision:
    """The mask and what it was decided by, each [T]; ``certified`` is None unless asked for.

    ``undecided``: the mask compared a NaN, and its answer means nothing.
    """

    mask: MaskResult
    divergence: Tensor
    direction: Tensor
    certified: Tensor | None
    undecided: Tensor


def decide(
    config: PolicyLossConfig, stats: PolicyStatistics, support: BehaviorSupport, advantages: Tensor
) -> Decision:
    """Apply the configured mask to tokens whose statistics are detached."""
    divergence = _divergence(config, stats, support)
    direction, certified = _direction(config, stats, support)
    mask = _mask(config, stats, support, advantages, divergence, direction)
    undecided = torch.zeros_like(mask.keep)
    if config.mask == "divergence":
        undecided = divergence.isnan() | direction.isnan()
    return Decision(mask, divergence, direction, certified, undecided)


def _divergence(
    config: PolicyLossConfig, stats: PolicyStatistics, support: BehaviorSupport
) -> Tensor:
    if config.divergence == "binary_kl":
        return binary_kl(support.sampled_log_probs, stats.log_prob)
    if config.divergence == "binary_tv":
        return binary_tv(support.sampled_log_probs, stats.log_prob)
    return topk_tv(support, stats) if config.divergence == "topk_tv" else topk_kl(support, stats)


def _direction(
    config: PolicyLossConfig, stats: PolicyStatistics, support: BehaviorSupport
) -> tuple[Tensor, Tensor | None]:
    if config.direction == "ratio":
        return ratio_direction(support.sampled_log_probs, stats.log_prob), None
    if config.divergence == "binary_kl":
        return binary_kl_direction(support.sampled_log_probs, stats.log_prob), None
    if config.divergence == "binary_tv":
        return binary_tv_direction(support.sampled_log_probs, stats.log_prob), None
    if config.direction == "certified":
        result = certified_kl_direction(support, stats)
        return result.direction, result.certified
    if config.divergence == "topk_tv":
        return tv_direction(support, stats, tail=config.direction), None
    return kl_direction(support, stats, tail=config.direction), None


def _mask(
    config: PolicyLossConfig,
    stats: PolicyStatistics,
    support: BehaviorSupport,
    advantages: Tensor,
    divergence: Tensor,
    direction: Tensor,
) -> MaskResult:
    if config.mask == "none":
        return MaskResult.keep_all(advantages)
    if config.mask == "divergence":
        return divergence_mask(advantages, divergence, direction, config.threshold)
    if config.mask == "ratio_clip":
        return ratio_clip_mask(
            advantages,
            support.sampled_log_probs,
            stats.log_prob,
            low=config.clip_low,
            high=config.clip_high,
        )
    mask = resolve_mask(config.mask)(stats, support, advantages)
    if not isinstance(mask, MaskResult):
        raise ValueError(
            f"policy_loss: mask {config.mask!r} must return a MaskResult, got {type(mask).__name__}"
        )
    for name in ("keep", "outside", "outward"):
        tensor = getattr(mask, name)
        if tensor.dtype != torch.bool or tensor.shape != advantages.shape:
            raise ValueError(
                f"policy_loss: mask {config.mask!r}: {name} must be bool of shape "
                f"{tuple(advantages.shape)}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    return mask
