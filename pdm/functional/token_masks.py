# SPDX-License-Identifier: Apache-2.0
"""Token masks: veto a token that is outside the trust region *and* about to move further out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MaskResult:
    """A mask and the two criteria it is made of; bool tensors of one shape, [T].

    keep = not (outside and outward). ``outside``: the trust region is left. ``outward``: the
    update would lead further out. A token that is not trained on (prompt, padding) is no business
    of a mask.
    """

    keep: Tensor
    outside: Tensor
    outward: Tensor

    @classmethod
    def from_criteria(cls, outside: Tensor, outward: Tensor) -> MaskResult:
        """Combine the proximity and the direction criterion, both [T] bool."""
        return cls(keep=~(outside & outward), outside=outside, outward=outward)

    @classmethod
    def keep_all(cls, like: Tensor) -> MaskResult:
        """Build the mask that vetoes nothing, in the shape and on the device of ``like``."""
        nowhere = torch.zeros_like(like, dtype=torch.bool)
        return cls.from_criteria(nowhere, nowhere)


@dataclass(frozen=True, eq=False)
class MaskCounts:
    """How many tokens fell under each criterion; int64 scalars on the mask's device.

    - ``tokens``: the trained tokens, of which all others are counted
    - ``outside``, ``outward``: each criterion on its own
    - ``vetoed``: tokens that are not kept
    - ``certified``: tokens whose direction has a proven sign, ``certified_outside``: those of them
      that are outside the trust region, where the sign decides. None if nothing was certified.

    Counts add up over micro-batches and ranks; divide only at the end.
    """

    tokens: Tensor
    outside: Tensor
    outward: Tensor
    vetoed: Tensor
    certified: Tensor | None
    certified_outside: Tensor | None


def mask_counts(
    mask: MaskResult, *, trained: Tensor | None = None, certified: Tensor | None = None
) -> MaskCounts:
    """Count the trained tokens by the criteria that they met.

    Shapes: a mask of [T]; ``trained`` [T] bool, the response tokens (None: all); ``certified`` [T]
    bool, as ``certified_kl_direction`` has it (None: not asked for). All counts are scalars.

    Gradient: none.

    Edge cases: no token counts where ``trained`` is false, whatever the mask says. Nothing is read
    back to the host.

    Source: predictive divergence masks, Eq. 13: the two criteria of the mask.
    """
    if trained is None:
        trained = torch.ones_like(mask.keep)
    return MaskCounts(
        tokens=trained.sum(),
        outside=(mask.outside & trained).sum(),
        outward=(mask.outward & trained).sum(),
        vetoed=(~mask.keep & trained).sum(),
        certified=None if certified is None else (certified & trained).sum(),
        certified_outside=(
            None if certified is None else (certified & mask.outside & trained).sum()
        ),
    )


def ratio_clip_mask(
    advantages: Tensor,
    behavior_log_prob: Tensor,
    policy_log_prob: Tensor,
    *,
    low: float,
    high: float,
) -> MaskResult:
    """Write the clipping of PPO and GRPO (clip-higher) as a mask.

    outside = r < 1 - low or r > 1 + high, outward = sign(A) sign(r - 1) > 0, with
    r = exp(log pi_k - log mu_k).

    Shapes: three tensors [T]; returns bool tensors [T].

    Gradient: none.

    Edge cases: ``low == high`` is the symmetric clip of PPO, ``high > low`` is clip-higher. A bound
    that is met exactly is inside. A = 0 or r = 1 is kept. A NaN compares
    false and is kept, so that it shows in the loss instead of vanishing from it. ``low`` outside
    (0, 1) or ``high`` that is not finite and above 0 raises ``ValueError``.

    Source: predictive divergence masks, Eq. 2 and 3.
    """
    if not 0.0 < low < 1.0:
        raise ValueError(f"ratio_clip_mask: low must be in (0, 1), got {low}")
    if not (math.isfinite(high) and high > 0.0):
        raise ValueError(f"ratio_clip_mask: high must be finite and above 0, got {high}")
    log_ratio = (policy_log_prob - behavior_log_prob).detach()
    ratio = log_ratio.exp()
    outside = (ratio < 1.0 - low) | (ratio > 1.0 + high)
    # sign(log r) is sign(r - 1) without the rounding of r to 1.
    return MaskResult.from_criteria(outside, _same_sign(advantages, log_ratio))


def divergence_mask(
    advantages: Tensor, divergence: Tensor, direction: Tensor, threshold: float
) -> MaskResult:
    """Veto tokens beyond a divergence threshold whose update would raise the divergence.

    outside = D > threshold, outward = sign(A) sign(D') > 0. With D' = r - 1 this is the DPPO mask,
    with a derivative of D the predictive one.

    Shapes: three tensors [T]; returns bool tensors [T].

    Gradient: none.

    Edge cases: D = threshold is inside. A = 0 or D' = 0 is kept. A NaN compares false and is
    kept, so that it shows in the loss instead of vanishing from it. A threshold that is not
    finite and above 0 raises ``ValueError``.

    Source: predictive divergence masks, Eq. 4 and 13.
    """
    if not (math.isfinite(threshold) and threshold > 0.0):
        raise ValueError(f"divergence_mask: threshold must be finite and above 0, got {threshold}")
    return MaskResult.from_criteria(divergence > threshold, _same_sign(advantages, direction))


def _same_sign(advantages: Tensor, direction: Tensor) -> Tensor:
    # Signs first: the float32 product of 1e-30 and 1e-30 is 0 and would keep the token.
    return advantages.sign() * direction.sign() > 0
