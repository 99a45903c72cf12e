# SPDX-License-Identifier: Apache-2.0
"""Group-relative advantages: a response is judged against the others to its own prompt."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageNormalization = Literal["std", "none"]
AdvantageBaseline = Literal["mean", "leave_one_out"]


def group_advantages(
    rewards: Tensor,
    prompt_ids: Tensor,
    *,
    normalize: AdvantageNormalization = "std",
    baseline: AdvantageBaseline = "mean",
    eps: float = 1e-6,
) -> Tensor:
    """Compute advantages within the group of responses that share a prompt id.

    A_b = (R_b - baseline_b) / (std_g + eps) for ``normalize="std"``, A_b = R_b - baseline_b for
    "none". std_g is the sample standard deviation (divided by the group size - 1), as in common
    GRPO implementations. The baseline is

    - ``"mean"``, the mean of the group
    - ``"leave_one_out"``, the mean of the *other* responses of the group, which leaves the policy
      gradient unbiased: R_b - baseline_b = n / (n - 1) (R_b - mean_g), with n the group size

    Shapes: ``rewards`` [B], ``prompt_ids`` [B] of any integer dtype, rows in any order; returns
    [B] float32, or float64 for float64 rewards. Computed in float64.

    Gradient: none; the result is detached.

    Edge cases: a group of one, and a group whose rewards are all equal, get exactly 0. A reward
    that is NaN or infinite gets advantage 0 and does not enter its group's mean, deviation or
    size. The order of the rows does not change a bit of the result on a CPU. B = 0 gives an empty
    result. Wrong shapes or dtypes, an unknown ``normalize`` or ``baseline``, and a negative or
    non-finite ``eps`` raise ``ValueError``.

    Source: Shao et al., 2024 (GRPO); normalize="none" as in Liu et al., 2025 (Dr. GRPO);
    baseline="leave_one_out" as in Ahmadian et al., 2024 (RLOO).
    """
    _check_arguments(rewards, prompt_ids, normalize, baseline, eps)
    finite = rewards.isfinite()
    values = torch.where(finite, rewards.detach(), 0.0).double()
    unique_ids, group = torch.unique(prompt_ids, return_inverse=True)
    zeros = values.new_zeros(unique_ids.numel())
    # A sum depends on the order of its terms: always the same one, whatever the order of the rows.
    order = values.argsort()
    ordered_group = group[order]
    size = zeros.index_add(0, group, finite.double())
    mean = zeros.index_add(0, ordered_group, values[order]) / size.clamp_min(1.0)
    centered = torch.where(finite, values - mean[group], 0.0)
    degrees = (size - 1.0).clamp_min(1.0)

    # The mean of equal rewards may be off by rounding, and eps = 0 would blow that up to 1.
    lowest = _group_extreme(torch.where(finite, values, torch.inf), group, zeros, "amin")
    highest = _group_extreme(torch.where(finite, values, -torch.inf), group, zeros, "amax")
    varied = (highest > lowest)[group]
    advantages = centered
    if baseline == "leave_one_out":
        advantages = advantages * (size / degrees)[group]
    if normalize == "std":
        variance = zeros.index_add(0, ordered_group, centered.square()[order]) / degrees
        scale = variance.sqrt()[group] + eps
        advantages = advantages / torch.where(varied, scale, 1.0)
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return torch.where(varied & finite, advantages, 0.0).to(dtype)


def _group_extreme(values: Tensor, group: Tensor, like: Tensor, reduce: str) -> Tensor:
    """Smallest ("amin") or largest ("amax") value of each group: [groups]."""
    return torch.zeros_like(like).scatter_reduce(0, group, values, reduce, include_self=False)


def _check_arguments(
    rewards: Tensor, prompt_ids: Tensor, normalize: str, baseline: str, eps: float
) -> None:
    for name, value, choices in (
        ("normalize", normalize, get_args(AdvantageNormalization)),
        ("baseline", baseline, get_args(AdvantageBaseline)),
    ):
        if value not in choices:
            raise ValueError(f"group_advantages: {name} must be one of {choices}, got {value!r}")
    if not (math.isfinite(eps) and eps >= 0.0):
        raise ValueError(f"group_advantages: eps must be finite and not negative, got {eps}")
    if rewards.dim() != 1 or prompt_ids.shape != rewards.shape:
        raise ValueError(
            "group_advantages: rewards and prompt_ids must both be [B], got "
            f"{tuple(rewards.shape)} and {tuple(prompt_ids.shape)}"
        )
    if prompt_ids.is_floating_point() or prompt_ids.is_complex():
        raise ValueError(f"group_advantages: prompt_ids must be integers, got {prompt_ids.dtype}")
