# SPDX-License-Identifier: Apache-2.0
"""Dual clip, reference penalty, entropy bonus, rejected sequences, the certified direction."""

import math

import pytest
import torch
from torch import Tensor

from pdm import (
    PolicyLossConfig,
    PolicyLossResult,
    PolicyStatistics,
    certified_kl_direction,
    kl_direction_full,
    policy_loss,
    policy_statistics,
    reference_kl,
    reference_kl_slope,
)
from tests.unit.pdm_cases import Case, random_case, sampled_only
from tests.unit.pdm_pairs import draw

NAN, INF = math.nan, math.inf


def picked(case: Case, logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, case.sampled[:, None]).squeeze(-1)


def test_dual_clip_by_hand_and_against_the_clipped_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(500, generator=generator)
    behavior = (-1.0 - 4.0 * torch.rand(500, generator=generator)).tolist()
    policy = (-0.01 - 4.0 * torch.rand(500, generator=generator)).tolist()
    log_prob, stats, support = sampled_only(behavior, policy)
    config = PolicyLossConfig(mask="ratio_clip", clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result = policy_loss(stats, support, advantages, config)
    result.loss.backward()

    plain = torch.tensor(policy, requires_grad=True)
    ratio = (plain - torch.tensor(behavior)).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    objective = torch.where(advantages < 0, torch.maximum(clipped, 3.0 * advantages), clipped)
    (-objective.sum()).backward()
    torch.testing.assert_close(log_prob.grad, plain.grad)
    assert torch.equal(result.dual_clipped, (advantages < 0) & (ratio > 3.0))
    assert 20 < result.dual_clipped.sum() < 200


def test_a_dual_clipped_token_adds_exactly_nothing_and_is_no_veto() -> None:
    log_prob, stats, support = sampled_only([-200.0, -2.0], [-1.0, -1.0])
    config = PolicyLossConfig(mask="none", dual_clip=3.0)
    result = policy_loss(stats, support, torch.tensor([-1.0, -1.0]), config)
    result.loss.backward()
    assert log_prob.grad.tolist() == pytest.approx([0.0, math.e])
    assert log_prob.grad[0] == 0
    assert result.dual_clipped.tolist() == [True, False]
    assert result.mask.keep.all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_penalty_and_bonus_add_their_own_gradients(estimator: str) -> None:
    case = random_case(seed=60, tokens=40)
    generator = torch.Generator().manual_seed(1)
    reference = picked(case, case.logits + torch.randn(40, 60, generator=generator).double())
    advantages = torch.randn(40, generator=generator).double()
    weights = torch.rand(40, generator=generator).double()
    trained = torch.rand(40, generator=generator) < 0.8
    config = PolicyLossConfig(
        threshold=0.05,
        kl_coefficient=0.3,
        kl_estimator=estimator,
        entropy_coefficient=0.02,
    )
    logits = case.logits.clone().requires_grad_()
    stats = policy_statistics(logits, case.support, entropy_gradient=True)
    result = policy_loss(
        stats,
        case.support,
        advantages,
        config,
        weights=weights,
        trained=trained,
        reference_log_prob=reference,
    )
    result.loss.backward()
    assert 3 < (~result.mask.keep).sum() < 37

    plain = case.logits.clone().requires_grad_()
    log_pi = torch.log_softmax(plain, dim=-1)
    own = log_pi.gather(-1, case.sampled[:, None]).squeeze(-1)
    entropy = -(log_pi.exp() * log_pi).sum(dim=-1)
    x = own - reference
    penalty = torch.exp(-x) - 1 + x if estimator == "k3" else x.square() / 2
    mu = case.log_mu.gather(-1, case.sampled[:, None]).squeeze(-1)
    policy = -advantages * result.mask.keep * torch.exp(own - mu)
    expected = (trained * weights * (policy + 0.3 * penalty - 0.02 * entropy)).sum()
    expected.backward()
    torch.testing.assert_close(result.loss.detach(), expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-10, atol=1e-12)
    assert result.reference_kl is not None
    torch.testing.assert_close(
        result.reference_kl, torch.where(trained, penalty.detach(), 0.0), rtol=1e-9, atol=1e-12
    )


def test_coefficient_is_the_derivative_by_the_log_prob() -> None:
    case = random_case(seed=61, tokens=30)
    stats = policy_statistics(case.logits, case.support)
    log_prob = stats.log_prob.clone().requires_grad_()
    stats = PolicyStatistics(**{**vars(stats), "log_prob": log_prob})
    config = PolicyLossConfig(kl_coefficient=0.5, ratio_cap=1.5)
    advantages = torch.linspace(-1, 1, 30).double()
    result = policy_loss(
        stats, case.support, advantages, config, reference_log_prob=stats.log_prob.detach() - 0.2
    )
    result.loss.backward()
    assert torch.equal(result.coefficient, log_prob.grad)
    assert not result.coefficient.requires_grad


def test_penalty_and_bonus_act_on_vetoed_rejected_and_indifferent_tokens() -> None:
    # r = 2 with A = 1 is vetoed; then a rejected token, one with A = 0, and a prompt token.
    log_prob, stats, support = sampled_only([-2.0] * 4, [-1.0] * 4)
    config = PolicyLossConfig(
        mask="ratio_clip", kl_coefficient=0.5, kl_estimator="k2", entropy_coefficient=0.1
    )
    result = policy_loss(
        stats,
        support,
        torch.tensor([1.0, -1.0, 0.0, 1.0]),
        config,
        trained=torch.tensor([True, True, True, False]),
        accepted=torch.tensor([True, False, True, True]),
        reference_log_prob=torch.tensor([-3.0] * 4),
    )
    result.loss.backward()
    assert log_prob.grad.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert stats.entropy.grad.tolist() == pytest.approx([-0.1, -0.1, -0.1, 0.0])
    assert result.loss.item() == pytest.approx(3 * (0.5 * 2.0 - 0.1))
    assert result.num_tokens.item() == 3


def test_a_reference_without_a_coefficient_is_only_reported() -> None:
    log_prob, stats, support = sampled_only([-1.0], [-1.0])
    result = policy_loss(
        stats,
        support,
        torch.ones(1),
        PolicyLossConfig(),
        reference_log_prob=torch.tensor([-1.5]),
    )
    result.loss.backward()
    assert log_prob.grad.tolist() == [-1.0]
    assert result.reference_kl.item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_terms_name_what_they_lack() -> None:
    case = random_case(seed=62)
    stats = policy_statistics(case.logits.requires_grad_(), case.support)
    ones = torch.ones(7)
    with pytest.raises(ValueError, match=r"kl_coefficient=0.1 needs reference_log_prob"):
        policy_loss(stats, case.support, ones, PolicyLossConfig(kl_coefficient=0.1))
    with pytest.raises(ValueError, match="make the statistics with entropy_gradient=True"):
        policy_loss(stats, case.support, ones, PolicyLossConfig(entropy_coefficient=0.1))
    with pytest.raises(ValueError, match=r"accepted must be bool, got torch.float32"):
        policy_loss(stats, case.support, ones, PolicyLossConfig(), accepted=ones)
    with pytest.raises(ValueError, match=r"reference_log_prob must be .* got \(1,\)"):
        policy_loss(
            stats, case.support, ones, PolicyLossConfig(), reference_log_prob=torch.zeros(1)
        )
    # For evaluation nothing carries a gradient, and the entropy need not either.
    with torch.no_grad():
        stats = policy_statistics(case.logits.detach(), case.support)
        config = PolicyLossConfig(entropy_coefficient=0.1)
        assert policy_loss(stats, case.support, ones, config).loss.isfinite()


def test_estimators_against_their_formulas_and_gradients() -> None:
    reference = torch.tensor([-1.0, -2.0, -0.5, -30.0], dtype=torch.float64)
    policy = torch.tensor([-1.5, -0.1, -0.5, -1.0], dtype=torch.float64, requires_grad=True)
    x = (policy - reference).detach()
    k3 = reference_kl(policy, reference)
    torch.testing.assert_close(k3.detach(), torch.exp(-x) - 1 + x)
    torch.testing.assert_close(reference_kl(policy, reference, "k2").detach(), x.square() / 2)
    for estimator in ("k2", "k3"):
        (slope,) = torch.autograd.grad(reference_kl(policy, reference, estimator).sum(), policy)
        torch.testing.assert_close(slope, reference_kl_slope(policy, reference, estimator).detach())
    # Near equality: the textbook form of k3 gives 0 or 6e-8 in float32.
    near = reference_kl(torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0**-14]))
    assert near.item() == pytest.approx(2.0**-29, rel=1e-3, abs=0)
    assert reference_kl(torch.tensor([-200.0]), torch.tensor([-1.0])).item() == INF
    assert reference_kl(torch.tensor([-INF]), torch.tensor([-1.0])).item() == INF
    with pytest.raises(ValueError, match=r"estimator must be one of .* got 'k1'"):
        reference_kl(policy, reference, "k1")


def test_k2_has_the_gradient_of_the_kl_to_the_reference() -> None:
    # E_pi[x grad log pi] = grad KL(pi || ref), E_pi[(1 - ref/pi) grad log pi] = grad KL(ref || pi).
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    log_ref = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), dim=-1)
    log_pi = torch.log_softmax(logits, dim=-1)
    targets = {
        "k2": (log_pi.exp() * (log_pi - log_ref)).sum(),
        "k3": (log_ref.exp() * (log_ref - log_pi)).sum(),
    }
    for estimator, target in targets.items():
        (expected,) = torch.autograd.grad(target, logits, retain_graph=True)
        estimate = (log_pi.exp().detach() * reference_kl(log_pi, log_ref, estimator)).sum()
        (mean,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(mean, expected)


def test_rejected_sequences_add_nothing_and_stay_in_the_count() -> None:
    log_prob, stats, support = sampled_only([-1.0, -200.0, NAN], [-1.0, -1.0, -1.0])
    result = policy_loss(
        stats,
        support,
        torch.ones(3),
        PolicyLossConfig(mask="none"),
        accepted=torch.tensor([True, False, False]),
    )
    result.loss.backward()
    assert result.loss.item() == -1.0
    assert log_prob.grad.tolist() == [-1.0, 0.0, 0.0]
    assert result.num_tokens.item() == 3
    assert result.mask.keep.all()  # rejected is not vetoed
    assert not result.non_finite.any()


def test_certified_direction_in_the_loss() -> None:
    pairs = draw("spread", seed=65, tokens=3000, vocab=60, k=8)
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    advantages = torch.randn(3000, generator=torch.Generator().manual_seed(5))
    trained = torch.arange(3000) % 5 != 0

    def run(direction: str) -> PolicyLossResult:
        config = PolicyLossConfig(direction=direction, threshold=0.05)
        return policy_loss(stats, support, advantages, config, trained=trained)

    result = run("certified")
    own = certified_kl_direction(support, stats)
    assert torch.equal(result.direction[trained], own.direction[trained])
    assert torch.equal(result.certified, own.certified & trained)
    sure = result.certified & result.mask.outside
    outward = advantages * kl_direction_full(pairs.log_mu, pairs.log_pi, pairs.sampled) > 0
    assert torch.equal(result.mask.outward[sure], outward[sure])
    assert 50 < sure.sum() < result.mask.outside.sum()
    assert run("exact").certified is None
