# SPDX-License-Identifier: Apache-2.0
"""Divergences of behavior and policy at one token: KL(behavior || policy) and total variation.

Every KL here is a sum over buckets (tokens and a tail) of the same non-negative term

    b(mu, pi) = mu log(mu / pi) - mu + pi,

which equals mu log(mu / pi) after summation, because both sides have mass 1. Near pi = mu the
textbook terms are of first order and cancel down to a second-order sum; these do not cancel. A
total variation is half the sum of |mu - pi|, each gap formed from the logarithms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdm.functional.probabilities import (
    SERIES_RADIUS,
    exp_remainder_series,
    log1mexp,
    probability_gap,
)
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport


def topk_kl(support: BehaviorSupport, stats: PolicyStatistics) -> Tensor:
    """Compute the top-K divergence KL(behavior || policy) on the support and one tail bucket.

    D = sum_{i in K} mu_i log(mu_i / pi_i) + mu_tail log(mu_tail / pi_tail), in nats.

    Shapes: a support of [T, S] and the statistics of the same T tokens; returns [T] in the wider
    of both dtypes.

    Gradient: none in practice; the statistics it reads are detached.

    Edge cases: never negative, 0 at equality, and accurate near it; a lower bound of the full KL.
    0 log 0 counts as 0; unused columns add exactly 0. A support token that the policy calls
    impossible while mu_i > 0 gives +inf. The tail masses come from rounded sums and may vanish
    on one side only; pi_tail is floored at the smallest normal number inside the logarithm, so
    that rounding noise in mu_tail cannot give +inf. Where the reported head exceeds mass 1 (engine
    rounding), mu_tail is 0 and D stays non-negative. NaN stays NaN.

    Source: predictive divergence masks, Eq. 5.
    """
    valid = support.valid
    # Unused columns become mu = pi = 1, whose term is 0, before anything is subtracted: -inf - -inf
    # would be NaN in the value, and in the gradient even if the value were masked afterwards.
    log_mu = torch.where(valid, support.log_probs, 0.0)
    log_pi = torch.where(valid, stats.support_log_probs, 0.0)
    head = _bucket_kl(log_mu.exp(), log_pi.exp(), log_mu - log_pi).sum(dim=-1)
    return (head + _tail_bucket_kl(support.tail_prob, stats.tail_prob)).clamp_min(0.0)


def topk_tv(support: BehaviorSupport, stats: PolicyStatistics) -> Tensor:
    """Compute the top-K total variation on the support and one tail bucket.

    D = (sum_{i in K} |mu_i - pi_i| + |mu_tail - pi_tail|) / 2.

    Shapes: a support of [T, S] and the statistics of the same T tokens; returns [T] in the wider
    of both dtypes.

    Gradient: none in practice; the statistics it reads are detached.

    Edge cases: in [0, 1], a lower bound of the full total variation. At equality it is 0 up to the
    rounding of mu_tail, which is a difference of stored numbers (1e-7 in float32). Unused columns
    add exactly 0; a token that one side calls impossible is nothing special. NaN stays NaN.

    Source: predictive divergence masks, Eq. 35.
    """
    valid = support.valid
    log_mu = torch.where(valid, support.log_probs, 0.0)
    log_pi = torch.where(valid, stats.support_log_probs, 0.0)
    head = probability_gap(log_mu, log_pi).abs().sum(dim=-1)
    tail = (support.tail_prob - stats.tail_prob).abs()
    return (0.5 * (head + tail)).clamp_max(1.0)


def binary_kl(behavior_log_prob: Tensor, policy_log_prob: Tensor) -> Tensor:
    """Compute KL(behavior || policy) on the two buckets {sampled token, everything else}.

    D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), in nats.

    Shapes: both log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it; the loss passes detached ones.

    Edge cases: never negative, 0 at equality; 1 - mu is formed from the log-probability, so
    probabilities near 1 lose nothing. pi = 0 with mu > 0 gives +inf; 1 - pi is floored in the
    logarithm as in ``topk_kl``. A log-probability above 0 (rounding) counts as 0. NaN stays NaN.

    Source: predictive divergence masks, Appendix C, Eq. 29.
    """
    log_mu = behavior_log_prob.clamp_max(0.0)
    log_pi = policy_log_prob.clamp_max(0.0)
    head = _bucket_kl(log_mu.exp(), log_pi.exp(), log_mu - log_pi)
    floor = math.log(torch.finfo(torch.promote_types(log_mu.dtype, log_pi.dtype)).tiny)
    log_ratio = log1mexp(log_mu) - log1mexp(log_pi).clamp_min(floor)
    rest = _bucket_kl(-torch.expm1(log_mu), -torch.expm1(log_pi), log_ratio)
    return (head + rest).clamp_min(0.0)


def binary_tv(behavior_log_prob: Tensor, policy_log_prob: Tensor) -> Tensor:
    """Compute the total variation on the two buckets {sampled token, everything else}.

    D = |mu - pi|; both buckets differ by the same amount.

    Shapes: both log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it; the loss passes detached ones.

    Edge cases: in [0, 1], 0 only at equality: near it the gap keeps its relative accuracy. A
    log-probability above 0 (rounding) counts as 0. NaN stays NaN.

    Source: predictive divergence masks, Eq. 33 on the support of Eq. 28.
    """
    log_mu, log_pi = behavior_log_prob.clamp_max(0.0), policy_log_prob.clamp_max(0.0)
    return probability_gap(log_mu, log_pi).abs()


def full_kl(behavior_log_probs: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Compute KL(behavior || policy) over the whole vocabulary.

    D = sum_i mu_i log(mu_i / pi_i), in nats.

    Shapes: the log-probabilities of both, [T, V] each and normalised; returns [T] in the wider
    dtype.

    Gradient: flows into an argument that requires it.

    Edge cases: never negative, 0 at equality, and accurate near it. 0 log 0 counts as 0, so that
    padded columns may hold -inf on both sides; pi_i = 0 with mu_i > 0 gives +inf. NaN stays NaN.
    Shapes that differ raise ``ValueError``.

    Source: predictive divergence masks, section 3.2 and Eq. 23.
    """
    _require_same_shape("full_kl", behavior_log_probs, policy_log_probs)
    mu, pi = behavior_log_probs.exp(), policy_log_probs.exp()
    return _bucket_kl(mu, pi, behavior_log_probs - policy_log_probs).sum(dim=-1)


def full_tv(behavior_log_probs: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Compute the total variation over the whole vocabulary.

    D = sum_i |mu_i - pi_i| / 2.

    Shapes: the log-probabilities of both, [T, V] each and normalised; returns [T] in the wider
    dtype.

    Gradient: flows into an argument that requires it, with sign(0) = 0.

    Edge cases: in [0, 1], 0 at equality, and accurate near it. Padded columns may hold -inf on
    both sides. NaN stays NaN. Shapes that differ raise ``ValueError``.

    Source: predictive divergence masks, Eq. 33.
    """
    _require_same_shape("full_tv", behavior_log_probs, policy_log_probs)
    gap = probability_gap(behavior_log_probs, policy_log_probs)
    return (0.5 * gap.abs().sum(dim=-1)).clamp_max(1.0)


def _require_same_shape(function: str, behavior: Tensor, policy: Tensor) -> None:
    if behavior.dim() < 1 or behavior.shape != policy.shape:
        raise ValueError(
            f"{function}: behavior and policy log-probabilities must both be [T, V], got "
            f"{tuple(behavior.shape)} and {tuple(policy.shape)}"
        )


def _tail_bucket_kl(mu_tail: Tensor, pi_tail: Tensor) -> Tensor:
    """Bucket term of the tail, whose masses are given as probabilities: [T]."""
    tiny = torch.finfo(torch.promote_types(mu_tail.dtype, pi_tail.dtype)).tiny
    # An empty behaviour tail adds pi_tail alone; its log(0) would reach the gradient as 0 * inf.
    ratio = torch.where(mu_tail == 0, 1.0, mu_tail / pi_tail.clamp_min(tiny))
    log_ratio = torch.log(ratio)
    return _bucket_kl(mu_tail, pi_tail, log_ratio)


def _bucket_kl(mu: Tensor, pi: Tensor, log_ratio: Tensor) -> Tensor:
    """mu log(mu / pi) - mu + pi >= 0, elementwise, given log_ratio = log(mu / pi)."""
    has_mass = mu > 0
    distance = torch.where(has_mass, log_ratio, 0.0)
    near = has_mass & (distance.abs() < SERIES_RADIUS)
    series = exp_remainder_series(torch.where(near, distance, 0.0))
    far = torch.where(near, 0.0, distance)
    return torch.where(near, mu * series, mu * far - mu + pi)
