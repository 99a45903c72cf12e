# SPDX-License-Identifier: Apache-2.0
"""Differences of probabilities from log-probabilities, without cancellation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SERIES_RADIUS = 0.5
"""|x| below which ``exp_remainder`` is summed as a series."""

_SERIES_COEFFICIENTS = tuple((-1.0) ** n / math.factorial(n + 2) for n in range(14))
"""exp(-x) - 1 + x = x^2 * sum_n c_n x^n; 14 terms reach float64 rounding at the radius."""

_LOG_HALF = -math.log(2.0)


def probability_gap(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """Compute pi - mu, keeping the sign of log pi - log mu however close both are.

    pi - mu = mu (exp(log pi - log mu) - 1).

    Shapes: two tensors of one shape, elementwise.

    Gradient: flows into both; finite where a log-probability is -inf.

    Edge cases: -inf on both sides gives 0. NaN stays NaN.

    Source: predictive divergence masks, Eq. 9, in a form that does not cancel.
    """
    log_ratio = log_pi - log_mu
    near = log_ratio.abs() < 1.0
    close = log_mu.exp() * torch.expm1(torch.where(near, log_ratio, 0.0))
    return torch.where(near, close, log_pi.exp() - log_mu.exp())


def exp_remainder(x: Tensor) -> Tensor:
    """Compute exp(-x) - 1 + x >= 0, to rounding also near x = 0, where it is x^2 / 2.

    Shapes: any, elementwise.

    Gradient: flows into ``x``.

    Edge cases: +inf where exp(-x) overflows, and at both infinities of x. NaN stays NaN.

    Source: the term of every KL sum, mu log(mu / pi) - mu + pi = mu (exp(-x) - 1 + x) with
    x = log(mu / pi), predictive divergence masks, Eq. 5.
    """
    near = x.abs() < SERIES_RADIUS
    far = torch.where(near, 0.0, x)
    # -x to +inf before x: exp(-x) + x would be inf - inf at x = -inf.
    direct = torch.where(far == -torch.inf, torch.inf, torch.expm1(-far) + far)
    return torch.where(near, exp_remainder_series(torch.where(near, x, 0.0)), direct)


def exp_remainder_series(small: Tensor) -> Tensor:
    """Compute exp(-x) - 1 + x by its series, for |x| below ``SERIES_RADIUS`` only.

    Shapes: any, elementwise.

    Gradient: flows into ``small``.

    Source: predictive divergence masks, Eq. 5, as in ``exp_remainder``.
    """
    series = torch.full_like(small, _SERIES_COEFFICIENTS[-1])
    for coefficient in reversed(_SERIES_COEFFICIENTS[:-1]):
        series = series * small + coefficient
    return small.square() * series


def log1mexp(log_prob: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x <= 0, accurate at both ends; -inf at 0.

    Shapes: any, elementwise.

    Gradient: flows into ``log_prob``.

    Edge cases: NaN stays NaN, and x > 0 gives NaN.

    Source: Maechler, 2012, Accurately computing log(1 - exp(-|a|)).
    """
    # Two ways to lose the result: 1 - exp(x) cancels near 0, and log(1 - tiny) rounds far from it.
    near_one = log_prob > _LOG_HALF
    close = torch.where(near_one, log_prob, _LOG_HALF)
    far = torch.where(near_one, _LOG_HALF, log_prob)
    return torch.where(near_one, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
