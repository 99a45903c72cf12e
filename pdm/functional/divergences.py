# SPDX-License-Identifier: Apache-2.0
"""Divergences KL(behavior || policy) of one token's distributions.

Every divergence here is a sum over buckets (tokens and a tail) of the same non-negative term

    b(mu, pi) = mu log(mu / pi) - mu + pi,

which equals mu log(mu / pi) after summation, because both sides have mass 1. Near pi = mu the
textbook terms are of first order and cancel down to a second-order sum; these do not cancel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport

_SERIES_RADIUS = 0.5
"""|log(mu / pi)| below which the bucket term is summed as a series."""

_SERIES_COEFFICIENTS = tuple((-1.0) ** n / math.factorial(n + 2) for n in range(14))
"""exp(-d) - 1 + d = d^2 * sum_n c_n d^n; 14 terms reach float64 rounding at the radius."""

_LOG_HALF = -math.log(2.0)


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
    log_ratio = _log1mexp(log_mu) - _log1mexp(log_pi).clamp_min(floor)
    rest = _bucket_kl(-torch.expm1(log_mu), -torch.expm1(log_pi), log_ratio)
    return (head + rest).clamp_min(0.0)


def _tail_bucket_kl(mu_tail: Tensor, pi_tail: Tensor) -> Tensor:
    """Bucket term of the tail, whose masses are given as probabilities: [T]."""
    tiny = torch.finfo(torch.promote_types(mu_tail.dtype, pi_tail.dtype)).tiny
    log_ratio = torch.log(mu_tail / pi_tail.clamp_min(tiny))
    return _bucket_kl(mu_tail, pi_tail, log_ratio)


def _bucket_kl(mu: Tensor, pi: Tensor, log_ratio: Tensor) -> Tensor:
    """mu log(mu / pi) - mu + pi >= 0, elementwise, given log_ratio = log(mu / pi)."""
    has_mass = mu > 0
    distance = torch.where(has_mass, log_ratio, 0.0)
    near = has_mass & (distance.abs() < _SERIES_RADIUS)
    small = torch.where(near, distance, 0.0)
    series = torch.full_like(small, _SERIES_COEFFICIENTS[-1])
    for coefficient in reversed(_SERIES_COEFFICIENTS[:-1]):
        series = series * small + coefficient
    far = torch.where(near, 0.0, distance)
    return torch.where(near, mu * small.square() * series, mu * far - mu + pi)


def _log1mexp(log_prob: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, accurate at both ends; -inf at 0."""
    # Two ways to lose the result: 1 - exp(x) cancels near 0, and log(1 - tiny) rounds far from it.
    near_one = log_prob > _LOG_HALF
    close = torch.where(near_one, log_prob, _LOG_HALF)
    far = torch.where(near_one, _LOG_HALF, log_prob)
    return torch.where(near_one, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
