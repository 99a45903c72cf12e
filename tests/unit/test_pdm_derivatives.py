# SPDX-License-Identifier: Apache-2.0
"""Every derivative against float64 autograd and finite differences along z + eta v.

Errors are relative to the sum of the absolute terms of the formula, which is what rounding is
relative to where terms cancel.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdm import (
    BehaviorSupport,
    PolicyStatistics,
    full_kl,
    full_tv,
    kl_direction,
    kl_direction_full,
    policy_statistics,
    topk_kl,
    topk_tv,
    tv_direction,
    tv_direction_full,
)
from pdm.functional.directions import TailModel
from tests.unit.pdm_pairs import REGIMES, Pairs, draw

TOLERANCE = 1e-12
SHAPES = [(regime, k) for regime in REGIMES for k in (1, 6, 40)]
TAILS: tuple[TailModel, ...] = ("aggregated", "uniform", "exact")
KINDS = ("kl", "tv")
# Gaps below the rounding of a probability have no sign, and TV' is made of signs.
KINKS = ("nearly_equal",)


def draw_pairs(regime: str, k: int, seed: int = 40, tokens: int = 60) -> Pairs:
    return draw(regime, seed, tokens, vocab=48, k=k)


def softmax_step(logits: Tensor, sampled: Tensor) -> Tensor:
    """v_i = 1[i = k] - pi_i: [T, V]."""
    return torch.nn.functional.one_hot(sampled, logits.shape[-1]) - torch.softmax(logits, dim=-1)


def along_step(divergence: Callable[[Tensor], Tensor], logits: Tensor, sampled: Tensor) -> Tensor:
    """d/d eta of divergence(log_softmax(z + eta v)) at 0 by autograd: [T]."""
    eta = torch.zeros(len(logits), 1, dtype=logits.dtype, requires_grad=True)
    moved = logits + eta * softmax_step(logits, sampled)
    (slope,) = torch.autograd.grad(divergence(torch.log_softmax(moved, dim=-1)).sum(), eta)
    return slope.squeeze(-1)


def differentiable(log_pi: Tensor, support: BehaviorSupport) -> PolicyStatistics:
    """The statistics that a divergence reads, with their gradient."""
    picked = log_pi.gather(-1, support.token_ids.clamp_min(0))
    in_tail = torch.ones_like(log_pi).scatter_add(
        -1, support.token_ids.clamp_min(0), -support.valid.to(log_pi.dtype)
    )
    nothing = torch.full_like(log_pi[..., 0], torch.nan)
    return PolicyStatistics(
        log_prob=nothing,
        support_log_probs=torch.where(support.valid, picked, -torch.inf),
        tail_prob=(log_pi.exp() * in_tail).sum(dim=-1),
        sum_square=nothing,
        tail_sum_square=nothing,
        tail_max=nothing,
        entropy=nothing,
        vocab_size=log_pi.shape[-1],
    )


def at_sampled(values: Tensor, sampled: Tensor) -> Tensor:
    return values.gather(-1, sampled.unsqueeze(-1)).squeeze(-1)


def kl_scale(log_mu: Tensor, log_pi: Tensor, sampled: Tensor) -> Tensor:
    mu, pi = log_mu.exp(), log_pi.exp()
    return at_sampled(mu + pi, sampled) + (pi * (mu + pi)).sum(dim=-1)


def tv_scale(log_pi: Tensor, sampled: Tensor) -> Tensor:
    pi = log_pi.exp()
    return 0.5 * (at_sampled(pi, sampled) * 2.0 + 2.0 * pi.square().sum(dim=-1))


def assert_close(result: Tensor, expected: Tensor, scale: Tensor, tolerance: float) -> None:
    error = (result - expected).abs() / scale
    assert error.max() <= tolerance, f"{error.max():.2e} at token {int(error.argmax())}"


@pytest.mark.parametrize("regime", REGIMES)
def test_full_directions_are_the_derivatives_of_the_full_divergences(regime: str) -> None:
    pairs = draw_pairs(regime, k=1)
    log_mu, log_pi, sampled = pairs.log_mu, pairs.log_pi, pairs.sampled
    kl = along_step(lambda x: (log_mu.exp() * (log_mu - x)).sum(dim=-1), pairs.policy, sampled)
    kl_size = kl_scale(log_mu, log_pi, sampled)
    assert_close(kl_direction_full(log_mu, log_pi, sampled), kl, kl_size, TOLERANCE)
    own_kl = along_step(lambda x: full_kl(log_mu, x), pairs.policy, sampled)
    assert_close(own_kl, kl, kl_size, TOLERANCE)  # the library's own divergence
    if regime in KINKS:
        return
    tv = along_step(
        lambda x: 0.5 * (log_mu.exp() - x.exp()).abs().sum(dim=-1), pairs.policy, sampled
    )
    tv_size = tv_scale(log_pi, sampled)
    assert_close(tv_direction_full(log_mu, log_pi, sampled), tv, tv_size, TOLERANCE)
    own_tv = along_step(lambda x: full_tv(log_mu, x), pairs.policy, sampled)
    assert_close(own_tv, tv, tv_size, TOLERANCE)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("tail", TAILS)
def test_a_support_of_the_whole_vocabulary_has_the_full_derivative(
    regime: str, tail: TailModel
) -> None:
    pairs = draw_pairs(regime, k=48)
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    log_mu, log_pi, sampled = pairs.log_mu, pairs.log_pi, pairs.sampled
    assert_close(
        kl_direction(support, stats, tail),
        kl_direction_full(log_mu, log_pi, sampled),
        kl_scale(log_mu, log_pi, sampled),
        TOLERANCE,
    )
    if regime not in KINKS:
        assert_close(
            tv_direction(support, stats, tail),
            tv_direction_full(log_mu, log_pi, sampled),
            tv_scale(log_pi, sampled),
            TOLERANCE,
        )


@pytest.mark.parametrize(("regime", "k"), SHAPES)
def test_exact_is_the_derivative_of_the_topk_divergence(regime: str, k: int) -> None:
    pairs = draw_pairs(regime, k)
    support, sampled = pairs.support(), pairs.sampled
    stats = policy_statistics(pairs.policy, support)
    kl = along_step(lambda x: topk_kl(support, differentiable(x, support)), pairs.policy, sampled)
    # The tail's term mu_tail * sum pi_j^2 / pi_tail is at most mu_tail * max pi_j.
    size = kl_scale(pairs.log_mu, pairs.log_pi, sampled) + support.tail_prob * stats.tail_max
    assert_close(kl_direction(support, stats, "exact"), kl, size, TOLERANCE)
    if regime in KINKS:
        return
    tv = along_step(lambda x: topk_tv(support, differentiable(x, support)), pairs.policy, sampled)
    tv_size = tv_scale(pairs.log_pi, sampled)
    assert_close(tv_direction(support, stats, "exact"), tv, tv_size, TOLERANCE)


def merged(log_probs: Tensor, support: BehaviorSupport) -> Tensor:
    """The support's columns and the tail as one more token: [T, S + 1]."""
    picked = log_probs.gather(-1, support.token_ids.clamp_min(0))
    picked = torch.where(support.valid, picked, -torch.inf)
    head = torch.zeros_like(log_probs, dtype=torch.int64).scatter_add(
        -1, support.token_ids.clamp_min(0), support.valid.long()
    )
    tail = torch.where(head == 0, log_probs, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([picked, tail], dim=-1)


@pytest.mark.parametrize(("regime", "k"), SHAPES)
def test_aggregated_is_the_derivative_where_the_tail_is_one_logit(regime: str, k: int) -> None:
    pairs = draw_pairs(regime, k)
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    log_mu, logits = merged(pairs.log_mu, support), merged(pairs.log_pi, support)
    column = support.sampled_column
    kl = along_step(lambda x: full_kl(log_mu, x), logits, column)
    size = kl_scale(log_mu, logits, column)
    assert_close(kl_direction(support, stats, "aggregated"), kl, size, TOLERANCE)
    if regime in KINKS:
        return
    tv = along_step(lambda x: full_tv(log_mu, x), logits, column)
    assert_close(
        tv_direction(support, stats, "aggregated"), tv, tv_scale(logits, column), TOLERANCE
    )


@pytest.mark.parametrize("regime", ["flat", "spread", "heavy_tail"])
@pytest.mark.parametrize("k", [1, 6])
def test_uniform_is_the_full_derivative_where_both_tails_are_uniform(regime: str, k: int) -> None:
    pairs = draw_pairs(regime, k)
    support = pairs.support()

    def flattened(log_probs: Tensor) -> Tensor:
        tail = torch.ones_like(log_probs, dtype=torch.bool)
        for t in range(len(tail)):
            tail[t, support.token_ids[t][support.valid[t]]] = False
        mass = torch.where(tail, log_probs, -torch.inf).logsumexp(dim=-1)
        return torch.where(tail, (mass - tail.sum(dim=-1).double().log()).unsqueeze(-1), log_probs)

    log_mu, log_pi = flattened(pairs.log_mu), flattened(pairs.log_pi)
    stats = policy_statistics(log_pi, support)
    for tail in ("uniform", "exact"):
        assert_close(
            tv_direction(support, stats, tail),
            tv_direction_full(log_mu, log_pi, pairs.sampled),
            tv_scale(log_pi, pairs.sampled),
            TOLERANCE,
        )
        assert_close(
            kl_direction(support, stats, tail),
            kl_direction_full(log_mu, log_pi, pairs.sampled),
            kl_scale(log_mu, log_pi, pairs.sampled),
            TOLERANCE,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("regime", "k"), [("spread", 6), ("heavy_tail", 1), ("peaked", 6)])
def test_exact_against_finite_differences_of_the_statistics(kind: str, regime: str, k: int) -> None:
    pairs = draw_pairs(regime, k, tokens=200)
    support = pairs.support()
    step = softmax_step(pairs.policy, pairs.sampled)

    def divergence(eta: float) -> Tensor:
        stats = policy_statistics(pairs.policy + eta * step, support)
        return topk_kl(support, stats) if kind == "kl" else topk_tv(support, stats)

    h = 1e-4
    inner, outer = divergence(h) - divergence(-h), divergence(2 * h) - divergence(-2 * h)
    expected = (8.0 * inner - outer) / (12.0 * h)
    stats = policy_statistics(pairs.policy, support)
    direction = kl_direction if kind == "kl" else tv_direction
    error = (direction(support, stats, "exact") - expected).abs()
    # A gap that changes its sign within the step makes a kink in the total variation.
    share = 1.0 if kind == "kl" else 0.95
    assert (error <= 1e-9).double().mean() >= share


@pytest.mark.parametrize("kind", KINDS)
def test_full_against_finite_differences(kind: str) -> None:
    pairs = draw_pairs("spread", k=1, tokens=200)
    step = softmax_step(pairs.policy, pairs.sampled)

    def divergence(eta: float) -> Tensor:
        log_pi = torch.log_softmax(pairs.policy + eta * step, dim=-1)
        return full_kl(pairs.log_mu, log_pi) if kind == "kl" else full_tv(pairs.log_mu, log_pi)

    h = 1e-4
    expected = (divergence(h) - divergence(-h)) / (2.0 * h)
    direction = kl_direction_full if kind == "kl" else tv_direction_full
    error = (direction(pairs.log_mu, pairs.log_pi, pairs.sampled) - expected).abs()
    assert (error <= 1e-7).double().mean() >= (1.0 if kind == "kl" else 0.9)
