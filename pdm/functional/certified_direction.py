# SPDX-License-Identifier: Apache-2.0
"""The sign of the full-vocabulary KL derivative, from what a rollout stores: an interval for it.

The derivative along the sampled token's step,

    D' = (pi_k - mu_k) + sum_{i in K} pi_i (mu_i - pi_i) + t - sum_{j not in K} pi_j^2,

is known up to t = sum_{j not in K} pi_j mu_j, since the trainer owns the whole policy and the
rollout knows mu on K. And t cannot be just anything: no unseen token is likelier under mu than the
least likely top-K entry, nor than the whole tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdm.functional.directions import kl_direction
from pdm.functional.probabilities import probability_gap
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport

LOG_PROB_ROUNDINGS = 16.0
"""Error that a log-probability l may carry, in units of eps: LOG_PROB_ROUNDINGS + |l|.

It covers storing l (|l| / 2 units), the exponent z - max z (as much again) and the sum over the
vocabulary in log sum exp (a tree of 17 levels over 151,936 tokens makes at most 9 units).
"""


@dataclass(frozen=True, eq=False)
class CertifiedDirection:
    """A direction, and on which tokens its sign is proven.

    - ``direction`` [T]: the exact direction, moved into the certified interval
    - ``certified`` [T] bool: the interval lies on one side of 0

    Source: section 4 of docs/method.md.
    """

    direction: Tensor
    certified: Tensor


def kl_direction_bounds(support: BehaviorSupport, stats: PolicyStatistics) -> tuple[Tensor, Tensor]:
    """Bound the derivative of the *full-vocabulary* KL along the sampled token's gradient step.

    lower = known - slack, upper = known + t_max + slack, where

    - known = (pi_k - mu_k) + sum_{i in K} pi_i (mu_i - pi_i) - sum_{j not in K} pi_j^2
    - t_max = min(mu_bar pi_tail, pi_max mu_tail, sqrt(mu_bar mu_tail sum_{j not in K} pi_j^2))
      bounds sum_{j not in K} pi_j mu_j, pi_max being the largest unseen pi_j (``stats.tail_max``)
    - mu_bar = min(least mu_i of the top K, mu_tail) bounds every unseen mu_j. The sampled token is
      not counted among the top K, see ``BehaviorSupport.topk_floor``.

    The third bound is Cauchy-Schwarz with sum mu_j^2 <= mu_bar mu_tail. The slack covers rounding:
    each stored or computed log-probability l may be off by (16 + |l|) eps, with eps that of its
    dtype (``LOG_PROB_ROUNDINGS``). The interval is therefore a statement about the policies
    themselves and not about their rounded records, as long as mu was recorded in the dtype it is
    held in.

    Shapes: a support of [T, S] and the statistics of the same T tokens; returns (lower [T],
    upper [T]) in the wider of both dtypes. Computed in float64.

    Gradient: none; the results are detached.

    Edge cases: with the whole vocabulary in the support, or an empty policy tail, only the slack
    is between both ends. NaN in what a token's bounds are made of, and a support that lacks the
    sampled token, give NaN. Log-probabilities that were rounded to a narrower dtype before, and
    columns besides the sampled token that are not the top K of mu, void the guarantee.

    Source: section 4 of docs/method.md; the derivative is predictive divergence masks, Eq. 7.
    """
    out = torch.promote_types(support.log_probs.dtype, stats.support_log_probs.dtype)
    mu_eps = torch.finfo(support.log_probs.dtype).eps
    pi_eps = torch.finfo(stats.support_log_probs.dtype).eps
    valid = support.valid
    log_mu = torch.where(valid, support.log_probs.detach().double(), -torch.inf)
    log_pi = torch.where(valid, stats.support_log_probs.detach().double(), -torch.inf)
    mu, pi = log_mu.exp(), log_pi.exp()
    mu_error, pi_error = _rounding(mu, mu_eps), _rounding(pi, pi_eps)

    tail_square = stats.tail_sum_square.detach().double()
    tail_square_error = 2.0 * _rounding(tail_square, pi_eps)
    gap = probability_gap(log_mu, log_pi)
    local = support.gather_sampled(gap) * -torch.expm1(support.gather_sampled(log_pi))
    coupling = torch.where(support.is_sampled, 0.0, pi * gap).sum(dim=-1)
    known = local - coupling - tail_square

    # known is quadratic in mu and pi, so these four sums are all that their errors can do to it.
    hit = support.is_sampled.double()
    slack = (
        ((pi - hit).abs() * mu_error).sum(dim=-1)
        + ((hit + mu - 2.0 * pi).abs() * pi_error).sum(dim=-1)
        + (pi_error * (mu_error + pi_error)).sum(dim=-1)
        + tail_square_error
    )
    mu_tail = support.tail_prob.double() * (1.0 + mu_eps) + mu_error.sum(dim=-1)
    unseen = _unseen_coupling_bound(support, stats, mu_tail, tail_square + tail_square_error)
    slack = slack + torch.finfo(out).eps * (known.abs() + unseen)
    return (known - slack).to(out), (known + unseen + slack).to(out)


def certified_kl_direction(support: BehaviorSupport, stats: PolicyStatistics) -> CertifiedDirection:
    """Decide by the certified interval where its sign is certain, by the exact direction elsewhere.

    direction = min(max(D'^exact, lower), upper), certified = lower > 0 or upper < 0, with
    (lower, upper) of ``kl_direction_bounds`` and D'^exact = ``kl_direction(tail="exact")``. Where
    the interval is on one side of 0, so is everything in it; one formula serves both cases.

    Shapes: a support of [T, S] and the statistics of the same T tokens; both results are [T].

    Gradient: none; the results are detached.

    Edge cases: NaN stays NaN and is not certified. Equal policies are not certified: D' is 0.

    Source: section 4 of docs/method.md.
    """
    lower, upper = kl_direction_bounds(support, stats)
    exact = kl_direction(support, stats, tail="exact").detach().to(lower.dtype)
    return CertifiedDirection(
        direction=torch.minimum(torch.maximum(exact, lower), upper),
        certified=(lower > 0) | (upper < 0),
    )


def _unseen_coupling_bound(
    support: BehaviorSupport, stats: PolicyStatistics, mu_tail: Tensor, tail_square: Tensor
) -> Tensor:
    """Bound sum_{j not in K} pi_j mu_j from above, given upper bounds of two of its parts: [T]."""
    pi_eps = torch.finfo(stats.support_log_probs.dtype).eps
    floor = support.topk_floor.double().exp()
    floor = floor + _rounding(floor, torch.finfo(support.log_probs.dtype).eps)
    mu_bar = torch.minimum(floor, mu_tail)
    pi_tail, pi_max = stats.tail_prob.detach().double(), stats.tail_max.detach().double()
    pi_tail, pi_max = pi_tail + _rounding(pi_tail, pi_eps), pi_max + _rounding(pi_max, pi_eps)
    by_mass = torch.minimum(mu_bar * pi_tail, pi_max * mu_tail)
    return torch.minimum(by_mass, (mu_bar * mu_tail * tail_square).sqrt())


def _rounding(prob: Tensor, eps: float) -> Tensor:
    """Absolute error of a probability whose logarithm l is off by (16 + |l|) eps."""
    error: Tensor = eps * (LOG_PROB_ROUNDINGS * prob + torch.special.entr(prob).abs())
    return error
