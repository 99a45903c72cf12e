# SPDX-License-Identifier: Apache-2.0
"""Will the next gradient step grow the divergence? First-order changes along a policy step.

A direction is the derivative of a divergence along the logit step v_i = 1[i = k] - pi_i of the
sampled token k, for a positive advantage; only the sign of direction and advantage is used.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport

TailModel = Literal["aggregated", "uniform", "exact"]


def ratio_direction(behavior_log_prob: Tensor, policy_log_prob: Tensor) -> Tensor:
    """Compute r - 1, the direction of PPO and DPPO: the sampled token's own change.

    r - 1 = exp(log pi_k - log mu_k) - 1.

    Shapes: both log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it; the loss passes detached ones.

    Edge cases: accurate near r = 1; overflows to +inf for a very large ratio. NaN stays NaN.

    Source: predictive divergence masks, Eq. 9.
    """
    return torch.expm1(policy_log_prob - behavior_log_prob)


def kl_direction(
    support: BehaviorSupport, stats: PolicyStatistics, tail: TailModel = "uniform"
) -> Tensor:
    """Compute the derivative of the top-K KL along the sampled token's gradient step.

    D' = (pi_k - mu_k) + sum_{i in K} pi_i (mu_i - pi_i) + tail term, the tail term being

    - ``"aggregated"``, the tail is one token: pi_tail (mu_tail - pi_tail)
    - ``"uniform"``, it is spread evenly: pi_tail (mu_tail - pi_tail) / (n - m), with n the true
      vocabulary size and m the number of tokens in the support
    - ``"exact"``, the derivative of Eq. 5 along the real softmax step:
      (mu_tail / pi_tail - 1) sum_{j not in K} pi_j^2

    Shapes: a support of [T, S] and the statistics of the same T tokens; returns [T] in the wider
    of both dtypes.

    Gradient: none in practice; the statistics it reads are detached.

    Edge cases: unused columns add 0 and are not counted in m. The tail term is 0 where n = m
    (uniform) or pi_tail = 0 (exact). NaN where the support lacks the sampled token; NaN stays
    NaN. An unknown ``tail`` raises ``ValueError``.

    Source: predictive divergence masks, Eq. 10 and 11; "exact" is Eq. 24 for the divergence of
    Eq. 5 with the policy's own tail, which the trainer can see.
    """
    if tail not in get_args(TailModel):
        raise ValueError(f"kl_direction: tail must be one of {get_args(TailModel)}, got {tail!r}")
    valid = support.valid
    log_mu = torch.where(valid, support.log_probs, -torch.inf)
    log_pi = torch.where(valid, stats.support_log_probs, -torch.inf)
    gap = _probability_gap(log_mu, log_pi)
    local = support.gather_sampled(gap)
    coupling = -(log_pi.exp() * gap).sum(dim=-1)
    return local + coupling + _kl_tail_term(support, stats, tail)


def binary_kl_direction(behavior_log_prob: Tensor, policy_log_prob: Tensor) -> Tensor:
    """Compute the derivative of the binary KL along the sampled token's gradient step.

    D' = 2 (1 - pi_k) (pi_k - mu_k).

    Shapes: both log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it; the loss passes detached ones.

    Edge cases: has the sign of r - 1 for 0 < pi_k < 1 and mu_k > 0, and is 0 at pi_k = 1, where no
    step is left. NaN stays NaN.

    Source: predictive divergence masks, Appendix C, Eq. 30.
    """
    gap = _probability_gap(behavior_log_prob, policy_log_prob)
    return -2.0 * torch.expm1(policy_log_prob) * gap


def _kl_tail_term(support: BehaviorSupport, stats: PolicyStatistics, tail: TailModel) -> Tensor:
    difference = support.tail_prob - stats.tail_prob
    if tail == "aggregated":
        return stats.tail_prob * difference
    if tail == "uniform":
        unseen = stats.vocab_size - support.valid.sum(dim=-1)
        term = stats.tail_prob * difference / unseen.clamp_min(1)
        return torch.where(unseen > 0, term, 0.0)
    # The test is for equality, so that a NaN tail stays visible.
    empty = stats.tail_prob == 0
    mean_prob = stats.tail_sum_square / torch.where(empty, 1.0, stats.tail_prob)
    return torch.where(empty, 0.0, difference * mean_prob)


def _probability_gap(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """pi - mu, elementwise, keeping the sign of log pi - log mu however close both are."""
    log_ratio = log_pi - log_mu
    near = log_ratio.abs() < 1.0
    close = log_mu.exp() * torch.expm1(torch.where(near, log_ratio, 0.0))
    return torch.where(near, close, log_pi.exp() - log_mu.exp())
