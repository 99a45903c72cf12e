# SPDX-License-Identifier: Apache-2.0
"""Will the next gradient step grow the divergence? First-order changes along a policy step.

A direction is the derivative of a divergence along the logit step v_i = 1[i = k] - pi_i of the
sampled token k, for a positive advantage; only the sign of direction and advantage is used.

Formulas are rearranged so that a sampled token with pi_k near 1 keeps its digits: 1 - pi_k is
formed from log pi_k, and never as a sum of terms near 1 that cancel.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from pdm.functional.probabilities import probability_gap
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
    _require_tail_model("kl_direction", tail)
    valid = support.valid
    log_mu = torch.where(valid, support.log_probs, -torch.inf)
    log_pi = torch.where(valid, stats.support_log_probs, -torch.inf)
    gap = probability_gap(log_mu, log_pi)
    # (pi_k - mu_k) and the coupling's own term at k, pi_k (mu_k - pi_k), as one product.
    local = support.gather_sampled(gap) * -torch.expm1(support.gather_sampled(log_pi))
    coupling = -torch.where(support.is_sampled, 0.0, log_pi.exp() * gap).sum(dim=-1)
    return local + coupling + _kl_tail_term(support, stats, tail)


def tv_direction(
    support: BehaviorSupport, stats: PolicyStatistics, tail: TailModel = "uniform"
) -> Tensor:
    """Compute the derivative of the top-K total variation along the sampled token's step.

    D' = -1/2 [sum_{i in K} s_i pi_i (1[i = k] - pi_i - c) - s_tail (q + c pi_tail)], with
    s = sign(mu - pi), sign(0) = 0, c = pi_k - sum_{i in K} pi_i^2 - q, and q being

    - ``"aggregated"``, the tail is one token: pi_tail^2
    - ``"uniform"``, it is spread evenly: pi_tail^2 / (n - m)
    - ``"exact"``, the policy's own tail: sum_{j not in K} pi_j^2, which makes D' the derivative of
      Eq. 35 along the real softmax step

    Shapes: a support of [T, S] and the statistics of the same T tokens; returns [T] in the wider
    of both dtypes.

    Gradient: none in practice; the statistics it reads are detached.

    Edge cases: unused columns add 0 and are not counted in m; q is 0 where n = m (uniform). A gap
    of exactly 0 adds nothing, so D' is 0 where both policies are equal. D' jumps where a gap
    changes its sign; the tail's sign is uncertain where |mu_tail - pi_tail| is below the rounding
    of mu_tail. NaN where the support lacks the sampled token; NaN stays NaN. An unknown ``tail``
    raises ``ValueError``.

    Source: predictive divergence masks, Eq. 38 and 42; "exact" is Eq. 34 for the divergence of
    Eq. 35, section 4 of docs/method.md.
    """
    _require_tail_model("tv_direction", tail)
    valid = support.valid
    log_mu = torch.where(valid, support.log_probs, -torch.inf)
    log_pi = torch.where(valid, stats.support_log_probs, -torch.inf)
    sign = -probability_gap(log_mu, log_pi).sign()
    tail_square = _tail_square(support, stats, tail)
    tail_sign = (support.tail_prob - stats.tail_prob).sign()
    prob = log_pi.exp()
    return _tv_change(
        sign=_append(sign, tail_sign),
        prob=_append(prob, stats.tail_prob),
        square=_append(prob.square(), tail_square),
        is_sampled=_append(support.is_sampled, torch.zeros_like(tail_sign, dtype=torch.bool)),
        log_pi_sampled=support.gather_sampled(log_pi),
    )


def binary_kl_direction(behavior_log_prob: Tensor, policy_log_prob: Tensor) -> Tensor:
    """Compute the derivative of the binary KL along the sampled token's gradient step.

    D' = 2 (1 - pi_k) (pi_k - mu_k).

    Shapes: both log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it; the loss passes detached ones.

    Edge cases: has the sign of r - 1 for 0 < pi_k < 1 and mu_k > 0, and is 0 at pi_k = 1, where no
    step is left. NaN stays NaN.

    Source: predictive divergence masks, Appendix C, Eq. 30.
    """
    gap = probability_gap(behavior_log_prob, policy_log_prob)
    return -2.0 * torch.expm1(policy_log_prob) * gap


def binary_tv_direction(behavior_log_prob: Tensor, policy_log_prob: Tensor) -> Tensor:
    """Compute the derivative of the binary total variation along the sampled token's step.

    D' = 2 pi_k (1 - pi_k)^2 sign(pi_k - mu_k).

    Shapes: both log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: none that matters: the sign is a constant to it.

    Edge cases: has the sign of r - 1 for 0 < pi_k < 1 and mu_k > 0, unless it underflows to 0; is 0
    at pi_k = 1 and at equality. NaN stays NaN.

    Source: predictive divergence masks, Eq. 34 on the support of Eq. 28.
    """
    rest = torch.expm1(policy_log_prob)
    sign = probability_gap(behavior_log_prob, policy_log_prob).sign()
    return 2.0 * policy_log_prob.exp() * rest.square() * sign


def kl_direction_full(
    behavior_log_probs: Tensor, policy_log_probs: Tensor, sampled_ids: Tensor
) -> Tensor:
    """Compute the derivative of the full-vocabulary KL along the sampled token's gradient step.

    D' = (pi_k - mu_k) + sum_i pi_i (mu_i - pi_i).

    Shapes: the log-probabilities of both, [T, V] each and normalised, ``sampled_ids`` [T] int64 in
    [0, V); returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it.

    Edge cases: padded columns may hold -inf on both sides. NaN stays NaN. Shapes that differ raise
    ``ValueError``.

    Source: predictive divergence masks, Eq. 7.
    """
    column = _sampled_column("kl_direction_full", behavior_log_probs, policy_log_probs, sampled_ids)
    gap = probability_gap(behavior_log_probs, policy_log_probs)
    local = gap.gather(-1, column) * -torch.expm1(policy_log_probs.gather(-1, column))
    coupling = (policy_log_probs.exp() * gap).scatter(-1, column, 0.0).sum(dim=-1)
    return local.squeeze(-1) - coupling


def tv_direction_full(
    behavior_log_probs: Tensor, policy_log_probs: Tensor, sampled_ids: Tensor
) -> Tensor:
    """Compute the derivative of the full total variation along the sampled token's gradient step.

    D' = -1/2 sum_i s_i pi_i (1[i = k] - pi_i - c), with s_i = sign(mu_i - pi_i), sign(0) = 0, and
    c = pi_k - sum_j pi_j^2.

    Shapes: the log-probabilities of both, [T, V] each and normalised, ``sampled_ids`` [T] int64 in
    [0, V); returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it, the signs being constants to it.

    Edge cases: padded columns may hold -inf on both sides; 0 at equality. NaN stays NaN. Shapes
    that differ raise ``ValueError``.

    Source: predictive divergence masks, Eq. 34.
    """
    column = _sampled_column("tv_direction_full", behavior_log_probs, policy_log_probs, sampled_ids)
    sign = -probability_gap(behavior_log_probs, policy_log_probs).sign()
    prob = policy_log_probs.exp()
    return _tv_change(
        sign=sign,
        prob=prob,
        square=prob.square(),
        is_sampled=torch.zeros_like(sign, dtype=torch.bool).scatter(-1, column, True),
        log_pi_sampled=policy_log_probs.gather(-1, column).squeeze(-1),
    )


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


def _tail_square(support: BehaviorSupport, stats: PolicyStatistics, tail: TailModel) -> Tensor:
    """Sum of squares over the tail, as the tail model has it: [T]."""
    if tail == "exact":
        return stats.tail_sum_square
    square = stats.tail_prob.square()
    if tail == "aggregated":
        return square
    unseen = stats.vocab_size - support.valid.sum(dim=-1)
    return torch.where(unseen > 0, square / unseen.clamp_min(1), 0.0)


def _tv_change(
    *, sign: Tensor, prob: Tensor, square: Tensor, is_sampled: Tensor, log_pi_sampled: Tensor
) -> Tensor:
    """-1/2 sum of s times the change of each bucket's mass: [T].

    Buckets [T, S]: their sign of mu - pi, their mass under pi, the sum of squares of their members'
    pi, and which is the sampled token, of log-probability ``log_pi_sampled`` [T].
    """
    log_pi = log_pi_sampled.unsqueeze(-1)
    rest = -torch.expm1(log_pi)  # 1 - pi_k
    others = torch.where(is_sampled, 0.0, square).sum(dim=-1, keepdim=True)
    # c = pi_k - sum_i pi_i^2, and 1 - pi_k - c, with what cancels taken out.
    mean = log_pi.exp() * rest - others
    moved = torch.where(is_sampled, prob * (rest.square() + others), -square - mean * prob)
    # All changes add up to 0, so any constant may be taken off the signs. That of the largest
    # bucket is: its change is minus all others', a small difference of large numbers.
    largest = sign.gather(-1, prob.argmax(dim=-1, keepdim=True))
    return -0.5 * ((sign - largest) * moved).sum(dim=-1)


def _append(columns: Tensor, last: Tensor) -> Tensor:
    return torch.cat([columns, last.unsqueeze(-1).to(columns.dtype)], dim=-1)


def _sampled_column(
    function: str, behavior_log_probs: Tensor, policy_log_probs: Tensor, sampled_ids: Tensor
) -> Tensor:
    shape = tuple(behavior_log_probs.shape)
    if not shape or policy_log_probs.shape != shape or sampled_ids.shape != shape[:-1]:
        raise ValueError(
            f"{function}: expected log-probabilities [T, V] of both and sampled_ids [T], got "
            f"{shape}, {tuple(policy_log_probs.shape)} and {tuple(sampled_ids.shape)}"
        )
    if sampled_ids.dtype != torch.int64:
        raise ValueError(f"{function}: sampled_ids must be int64, got {sampled_ids.dtype}")
    return sampled_ids.unsqueeze(-1)


def _require_tail_model(function: str, tail: str) -> None:
    if tail not in get_args(TailModel):
        raise ValueError(f"{function}: tail must be one of {get_args(TailModel)}, got {tail!r}")
