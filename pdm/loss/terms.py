# SPDX-License-Identifier: Apache-2.0
"""The summands of the loss, token by token, as constants: values and derivatives by log pi_k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdm.functional.penalties import reference_kl, reference_kl_slope
from pdm.loss.config import PolicyLossConfig
from pdm.loss.decision import Decision
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport


@dataclass(frozen=True, eq=False)
class LossTokens:
    """The inputs of the loss, [T] each, detached and of one dtype."""

    stats: PolicyStatistics
    support: BehaviorSupport
    advantages: Tensor
    weights: Tensor
    trained: Tensor
    accepted: Tensor
    reference_log_prob: Tensor | None

    @property
    def weighted(self) -> Tensor:
        """Tokens that can add anything at all: [T] bool."""
        return self.trained & (self.weights != 0)


@dataclass(frozen=True, eq=False)
class Term:
    """One summand of the loss, per token [T]; 0 in value and coefficient off ``active``."""

    active: Tensor  # bool
    value: Tensor
    coefficient: Tensor  # derivative by log pi_k; of the bonus, by the entropy
    non_finite: Tensor  # bool, within active
    estimate: Tensor  # what the value was made of, unweighted


@dataclass(frozen=True, eq=False)
class PolicyTerm(Term):
    """The term -w M r A, whose estimate is the log-ratio."""

    capped: Tensor
    dual_clipped: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """log pi_k - log mu_k: [T]."""
        return self.estimate


def policy_term(config: PolicyLossConfig, tokens: LossTokens, decision: Decision) -> PolicyTerm:
    """Compute -w M min(r, cap) A; as r is its own derivative, value and coefficient are one."""
    log_ratio = tokens.stats.log_prob - tokens.support.sampled_log_probs
    active = tokens.weighted & tokens.accepted & decision.mask.keep & (tokens.advantages != 0)
    dual_clipped = torch.zeros_like(active)
    if config.dual_clip is not None:
        beyond = log_ratio.exp() > config.dual_clip
        dual_clipped = tokens.trained & (tokens.advantages < 0) & beyond
        active = active & ~dual_clipped
    # Every factor of an inactive token is replaced, not multiplied by 0: 0 * inf is NaN. So
    # neutralise before each exp.
    ratio = torch.where(active, log_ratio, 0.0).exp()
    capped = torch.zeros_like(active)
    if config.ratio_cap is not None:
        capped = ratio > config.ratio_cap
        ratio = ratio.clamp_max(config.ratio_cap)
    scale = -tokens.advantages * tokens.weights
    coefficient = torch.where(active, scale * ratio, 0.0).to(scale.dtype)
    sound = log_ratio.isfinite() & coefficient.isfinite() & ~decision.undecided
    return PolicyTerm(
        active=active,
        value=coefficient,
        coefficient=coefficient,
        non_finite=active & ~sound,
        estimate=log_ratio,
        capped=capped,
        dual_clipped=dual_clipped,
    )


def penalty_term(config: PolicyLossConfig, tokens: LossTokens) -> Term:
    """Compute w b_KL KL(policy, reference); only the estimate if it is switched off."""
    if tokens.reference_log_prob is None:
        return _absent(tokens)
    log_prob, reference = tokens.stats.log_prob, tokens.reference_log_prob
    estimate = reference_kl(log_prob, reference, config.kl_estimator)
    if config.kl_coefficient == 0:
        return _absent(tokens, estimate)
    active = tokens.weighted
    factor = config.kl_coefficient * tokens.weights
    slope = reference_kl_slope(log_prob, reference, config.kl_estimator)
    value = torch.where(active, factor * estimate, 0.0)
    coefficient = torch.where(active, factor * slope, 0.0)
    sound = value.isfinite() & coefficient.isfinite()
    return Term(active, value, coefficient, active & ~sound, estimate)


def bonus_term(config: PolicyLossConfig, tokens: LossTokens) -> Term:
    """Compute -w b_H H."""
    entropy = tokens.stats.entropy
    if config.entropy_coefficient == 0:
        return _absent(tokens, entropy)
    active = tokens.weighted
    coefficient = torch.where(active, -config.entropy_coefficient * tokens.weights, 0.0)
    value = torch.where(active, coefficient * entropy, 0.0)
    return Term(active, value, coefficient, active & ~value.isfinite(), entropy)


def _absent(tokens: LossTokens, estimate: Tensor | None = None) -> Term:
    nowhere, zero = torch.zeros_like(tokens.trained), torch.zeros_like(tokens.weights)
    return Term(nowhere, zero, zero, nowhere, zero if estimate is None else estimate)
