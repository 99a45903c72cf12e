# SPDX-License-Identifier: Apache-2.0
"""The masked policy loss of a set of tokens, and the gradient that it is exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdm.functional.token_masks import MaskResult
from pdm.loss.config import PolicyLossConfig
from pdm.loss.decision import Decision, decide
from pdm.loss.terms import LossTokens, PolicyTerm, Term, bonus_term, penalty_term, policy_term
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport

_POSITIONS_SHOWN = 5


@dataclass(frozen=True, eq=False)
class PolicyLossResult:
    """The loss and what it was made of.

    - ``loss`` []: sum of w_t l_t; the only field that carries a gradient
    - ``num_tokens`` [] int64: number of trained tokens; vetoed, rejected and dropped ones included
    - ``mask`` [T] bool: on tokens that are not trained keep is true, outside and outward are false
    - ``log_ratio`` [T] log pi - log mu, ``ratio`` [T] its exponential, uncapped
    - ``coefficient`` [T]: d loss / d log pi_k of each token, everything included but the entropy
      bonus
    - ``capped`` [T] bool: tokens whose ratio was cut to ``ratio_cap`` in the gradient
    - ``dual_clipped`` [T] bool: trained tokens beyond ``dual_clip``, whatever the mask
    - ``divergence``, ``direction`` [T]: as configured, whatever the mask
    - ``certified`` [T] bool: tokens whose direction has a proven sign; None unless
      ``direction="certified"``
    - ``reference_kl`` [T]: the estimate; None without ``reference_log_prob``
    - ``non_finite`` [T] bool: tokens that would put NaN or an infinity into the loss or its
      gradient; they are in it, or are dropped if the config says so

    On tokens that are not trained, and on dropped ones, ``ratio`` is 1 and the other numbers are 0,
    so that sums over all tokens are sums over the trained ones.

    Source: predictive divergence masks, Eq. 13 and 14.
    """

    loss: Tensor
    num_tokens: Tensor
    mask: MaskResult
    log_ratio: Tensor
    ratio: Tensor
    coefficient: Tensor
    capped: Tensor
    dual_clipped: Tensor
    divergence: Tensor
    direction: Tensor
    certified: Tensor | None
    reference_kl: Tensor | None
    non_finite: Tensor


def policy_loss(
    stats: PolicyStatistics,
    support: BehaviorSupport,
    advantages: Tensor,
    config: PolicyLossConfig,
    *,
    weights: Tensor | None = None,
    trained: Tensor | None = None,
    accepted: Tensor | None = None,
    reference_log_prob: Tensor | None = None,
    check_finite: bool = True,
) -> PolicyLossResult:
    """Compute the masked policy loss of a set of tokens, as a sum.

    loss = sum_t w_t (-M_t r_t A_t + b_KL KL_t - b_H H_t), r_t = exp(log pi_k - log mu_k), M_t in
    {0, 1}, with b_KL = ``kl_coefficient`` and b_H = ``entropy_coefficient``, 0 by default. It is
    not divided by anything; the trainer divides once, by the global number of tokens.

    Shapes: statistics and support of the same T tokens, ``advantages`` [T]; ``weights`` [T] per
    token (None: all 1, only for ``aggregation="token_mean"``); ``trained`` [T] bool, the response
    tokens (None: all); ``accepted`` [T] bool, false on the tokens of a sequence that a sequence
    mask rejected (None: all accepted); ``reference_log_prob`` [T], log-probabilities of the sampled
    tokens under the reference policy at the same temperature. Any leading shape may stand in place
    of [T]. The loss has the dtype of ``stats.log_prob``.

    Gradient: exactly -w_t M_t min(r_t, ratio_cap) A_t grad log pi_k, through ``stats.log_prob``;
    the mask and the cap are constants to it. The penalty adds w_t b_KL times its slope times grad
    log pi_k (no importance ratio, as in GRPO), the bonus -w_t b_H grad H, through
    ``stats.entropy``. Every other field is detached.

    Which token adds what: the policy term leaves out a token that is vetoed, rejected, beyond
    ``dual_clip``, not trained, or has A_t = 0 or w_t = 0; such a token adds exactly 0 to the loss
    and to the gradient, whatever else it holds, NaN and infinities included. Penalty and bonus,
    where switched on, act on every trained token with w_t != 0: the mask, the acceptance and the
    advantage do not concern them, so there a vetoed token adds them and nothing else.

    Edge cases: a token that would add NaN or an infinity, or was kept because the mask compared a
    NaN, is ``non_finite``. By default that raises ``FloatingPointError`` with its position, at the
    price of one host synchronisation on an accelerator; with ``check_finite=False`` it shows in the
    loss, and ``raise_on_non_finite`` is for the caller to call in time. With ``non_finite="drop"``
    the token adds exactly 0, stays in ``num_tokens``, and nothing raises. With nothing kept, the
    loss is 0 and still back-propagates zeros. Wrong shapes or dtypes, and weights, a reference or
    an entropy gradient that the config needs but that did not come, raise ``ValueError``.

    Source: predictive divergence masks, Eq. 4, 13 and 14; dual clip as in Ye et al., 2020.
    """
    _check_arguments(
        stats, support, advantages, config, weights, trained, accepted, reference_log_prob
    )
    tokens = _tokens(stats, support, advantages, weights, trained, accepted, reference_log_prob)
    decision = decide(config, tokens.stats, support, tokens.advantages)
    policy = policy_term(config, tokens, decision)
    penalty = penalty_term(config, tokens)
    bonus = bonus_term(config, tokens)

    non_finite = policy.non_finite | penalty.non_finite | bonus.non_finite
    dropped = non_finite if config.non_finite == "drop" else torch.zeros_like(non_finite)
    coefficient = torch.where(dropped, 0.0, policy.coefficient + penalty.coefficient)
    value = torch.where(dropped, 0.0, policy.value + penalty.value + bonus.value)
    # The value is a constant; x - x.detach() is 0 with gradient 1, so that the coefficient is the
    # whole gradient. It is 0 - 0 where nothing is added: 0 * (inf - inf) would be NaN.
    log_prob = torch.where((policy.active | penalty.active) & ~dropped, stats.log_prob, 0.0)
    terms = value + coefficient * (log_prob - log_prob.detach())
    if config.entropy_coefficient != 0:
        entropy = torch.where(bonus.active & ~dropped, stats.entropy, 0.0)
        terms = terms + bonus.coefficient * (entropy - entropy.detach())

    policy = replace(policy, non_finite=non_finite)
    result = _report(terms.sum(), tokens, decision, policy, penalty, coefficient, dropped)
    if check_finite and config.non_finite == "raise":
        raise_on_non_finite(result)
    return result


def raise_on_non_finite(result: PolicyLossResult) -> None:
    """Raise ``FloatingPointError`` if the loss is not finite, naming the tokens that made it so.

    Shapes: a result of [T] tokens; positions in the message are indices into [T].

    Gradient: none.

    Edge cases: copies to the host, once. Made for ``check_finite=False``: a trainer that scores a
    batch in chunks calls it once per step on each result that it kept, before the optimizer's step.

    Source: predictive divergence masks, Eq. 14, which has no such terms.
    """
    bad = result.non_finite
    if not bool(bad.any()):
        return
    positions = bad.nonzero().tolist()
    shown = []
    for position in positions[:_POSITIONS_SHOWN]:
        index = tuple(position)
        numbers = ", ".join(
            f"{name}={getattr(result, name)[index].item():g}"
            for name in ("log_ratio", "coefficient", "divergence", "direction")
        )
        shown.append(f"token {position[0] if len(position) == 1 else index}: {numbers}")
    more = len(positions) - len(shown)
    raise FloatingPointError(
        f"policy_loss: {len(positions)} of {bad.numel()} tokens enter the loss but are not "
        f"finite: {'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}. Look for NaN in "
        "the logits and in the engine's log-probabilities, or for ratios that overflow "
        "(ratio_cap); non_finite='drop' leaves such tokens out and counts them"
    )


def _tokens(
    stats: PolicyStatistics,
    support: BehaviorSupport,
    advantages: Tensor,
    weights: Tensor | None,
    trained: Tensor | None,
    accepted: Tensor | None,
    reference_log_prob: Tensor | None,
) -> LossTokens:
    """Detach everything, bring it to the dtype of ``stats.log_prob`` and fill in what is None."""
    # Nothing but log_prob may carry a gradient, a custom mask's inputs included.
    fixed = replace(stats, log_prob=stats.log_prob.detach(), entropy=stats.entropy.detach())
    dtype = fixed.log_prob.dtype
    advantages = advantages.detach().to(dtype)
    everywhere = torch.ones_like(advantages, dtype=torch.bool)
    return LossTokens(
        stats=fixed,
        support=support,
        advantages=advantages,
        weights=torch.ones_like(advantages) if weights is None else weights.detach().to(dtype),
        trained=everywhere if trained is None else trained,
        accepted=everywhere if accepted is None else accepted,
        reference_log_prob=(
            None if reference_log_prob is None else reference_log_prob.detach().to(dtype)
        ),
    )


def _report(
    loss: Tensor,
    tokens: LossTokens,
    decision: Decision,
    policy: PolicyTerm,
    penalty: Term,
    coefficient: Tensor,
    dropped: Tensor,
) -> PolicyLossResult:
    """Collect the result, with neutral numbers where nothing is to be reported."""
    trained = tokens.trained
    reported = trained & ~dropped
    log_ratio = torch.where(reported, policy.log_ratio, 0.0)
    estimate = None
    if tokens.reference_log_prob is not None:
        estimate = torch.where(reported, penalty.estimate, 0.0)
    return PolicyLossResult(
        loss=loss,
        num_tokens=trained.sum(),
        mask=MaskResult(
            keep=decision.mask.keep | ~trained,
            outside=decision.mask.outside & trained,
            outward=decision.mask.outward & trained,
        ),
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        coefficient=coefficient,
        capped=policy.capped,
        dual_clipped=policy.dual_clipped,
        divergence=torch.where(reported, decision.divergence, 0.0),
        direction=torch.where(reported, decision.direction, 0.0),
        certified=None if decision.certified is None else decision.certified & trained,
        reference_kl=estimate,
        non_finite=policy.non_finite,
    )


def _check_arguments(
    stats: PolicyStatistics,
    support: BehaviorSupport,
    advantages: Tensor,
    config: PolicyLossConfig,
    weights: Tensor | None,
    trained: Tensor | None,
    accepted: Tensor | None,
    reference_log_prob: Tensor | None,
) -> None:
    expected = tuple(stats.log_prob.shape)
    arrived = {
        "the support": support.sampled,
        "advantages": advantages,
        "weights": weights,
        "trained": trained,
        "accepted": accepted,
        "reference_log_prob": reference_log_prob,
    }
    for name, tensor in arrived.items():
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"policy_loss: {name} must be for tokens of shape {expected}, like the "
                f"statistics, got {tuple(tensor.shape)}"
            )
    for name, tensor in (("trained", trained), ("accepted", accepted)):
        if tensor is not None and tensor.dtype != torch.bool:
            raise ValueError(f"policy_loss: {name} must be bool, got {tensor.dtype}")
    if weights is None and config.aggregation != "token_mean":
        raise ValueError(
            f"policy_loss: aggregation={config.aggregation!r} needs weights, which depend on the "
            "whole global batch; make them with token_weights and pass weights="
        )
    if config.sequence_mask is not None and accepted is None:
        raise ValueError(
            "policy_loss: sequence_mask is set, so the verdict on each token's sequence is needed; "
            "make it with accept_sequences and expand_to_tokens and pass accepted="
        )
    if config.kl_coefficient != 0 and reference_log_prob is None:
        raise ValueError(
            f"policy_loss: kl_coefficient={config.kl_coefficient} needs reference_log_prob, the "
            "sampled tokens' log-probabilities under the reference policy"
        )
    if (
        config.entropy_coefficient != 0
        and stats.log_prob.requires_grad
        and not stats.entropy.requires_grad
    ):
        raise ValueError(
            f"policy_loss: entropy_coefficient={config.entropy_coefficient} needs an entropy that "
            "carries a gradient; make the statistics with entropy_gradient=True"
        )
