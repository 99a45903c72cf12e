# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdm import (
    BehaviorSupport,
    PolicyStatistics,
    binary_kl_direction,
    binary_tv_direction,
    kl_direction,
    kl_direction_full,
    policy_statistics,
    ratio_direction,
    tv_direction,
    tv_direction_full,
)
from tests.unit.pdm_cases import Case, random_case, textbook_topk_kl

SHAPES = [(0.3, 5), (2.0, 5), (2.0, 1), (6.0, 20)]


def along_step(divergence, logits: torch.Tensor, k: int) -> float:
    """d/d eta of divergence(log_softmax(z + eta v)) at 0 by autograd, v = 1[i = k] - pi_i."""
    z = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(torch.log_softmax(z, dim=-1)), z)
    step = -torch.softmax(logits, dim=-1)
    step[k] += 1.0
    return float(gradient @ step)


def sum_of_terms(case: Case, t: int) -> float:
    """Scale of the cancellation: the absolute terms of the closed form."""
    pi, mu = case.log_pi[t].exp(), case.log_mu[t].exp()
    k = case.sampled[t]
    return float(pi[k] + mu[k] + (pi * mu).sum() + (pi * pi).sum())


def directions(case: Case, tail: str) -> torch.Tensor:
    support = case.support
    return kl_direction(support, policy_statistics(case.logits, support), tail=tail)


@pytest.mark.parametrize(("scale", "k"), SHAPES)
def test_exact_is_the_derivative_of_the_topk_kl(scale: float, k: int) -> None:
    for seed in range(6):
        case = random_case(seed, vocab=300, k=k, scale=scale)
        result = directions(case, "exact")
        for t in range(case.sampled.numel()):
            kept = case.kept_ids(t)
            expected = along_step(
                lambda log_pi, mu=case.log_mu[t], kept=kept: textbook_topk_kl(mu, log_pi, kept),
                case.logits[t],
                int(case.sampled[t]),
            )
            assert abs(result[t].item() - expected) <= 1e-12 * sum_of_terms(case, t)


@pytest.mark.parametrize(("scale", "k"), SHAPES)
def test_aggregated_is_the_derivative_when_the_tail_is_one_token(scale: float, k: int) -> None:
    case = random_case(seed=11, vocab=80, k=k, scale=scale)
    result = directions(case, "aggregated")
    for t in range(case.sampled.numel()):
        kept = case.kept_ids(t)
        tail = [j for j in range(80) if j not in kept]

        def merge(log_probs: torch.Tensor, kept=kept, tail=tail) -> torch.Tensor:
            bucket = torch.logsumexp(log_probs[tail], dim=-1, keepdim=True)
            return torch.cat([log_probs[kept], bucket])

        log_mu = merge(case.log_mu[t])
        expected = along_step(
            lambda log_pi, log_mu=log_mu: (log_mu.exp() * (log_mu - log_pi)).sum(),
            merge(case.log_pi[t]),
            kept.index(int(case.sampled[t])),
        )
        assert result[t].item() == pytest.approx(expected, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("k", [1, 5])
def test_uniform_is_the_full_derivative_when_the_tails_are_uniform(k: int) -> None:
    case = random_case(seed=12, vocab=80, k=k)
    log_mu, logits = case.log_mu.clone(), case.log_pi.clone()
    for t in range(case.sampled.numel()):
        tail = [j for j in range(80) if j not in case.kept_ids(t)]
        for log_probs in (log_mu, logits):
            log_probs[t, tail] = torch.logsumexp(log_probs[t, tail], dim=-1) - math.log(len(tail))
    support = case.support  # of the original mu: same support, same masses
    flat = policy_statistics(logits, support)
    result = kl_direction(support, flat, tail="uniform")
    exact = kl_direction(support, flat, tail="exact")
    for t in range(case.sampled.numel()):
        expected = along_step(
            lambda log_pi, t=t: (log_mu[t].exp() * (log_mu[t] - log_pi)).sum(),
            logits[t],
            int(case.sampled[t]),
        )
        assert result[t].item() == pytest.approx(expected, rel=1e-10, abs=1e-13)
        assert exact[t].item() == pytest.approx(expected, rel=1e-10, abs=1e-13)


def test_hand_worked_constants() -> None:
    # n = 6, K = {0, 1}, sampled 0. mu = (.5, .2 | .3), pi = (.6, .1 | .3 = .2 + .1 + 0 + 0).
    # Local .1; coupling .6(-.1) + .1(.1) = -.05; tail masses equal, so no model adds anything.
    log_pi = torch.tensor([[0.6, 0.1, 0.2, 0.1, 0.0, 0.0]], dtype=torch.float64).log()
    support = BehaviorSupport(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.5, 0.2]], dtype=torch.float64).log(),
        torch.tensor([0]),
    )
    stats = policy_statistics(log_pi, support)
    for tail in ("aggregated", "uniform", "exact"):
        assert kl_direction(support, stats, tail=tail).item() == pytest.approx(0.05, rel=1e-12)
    # mu = (.5, .1 | .4): coupling -.06, tail gap .1.
    support = BehaviorSupport(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.5, 0.1]], dtype=torch.float64).log(),
        torch.tensor([0]),
    )
    expected = {
        "aggregated": 0.04 + 0.3 * 0.1,
        "uniform": 0.04 + 0.3 * 0.1 / 4,
        "exact": 0.04 + 0.1 * (0.04 + 0.01) / 0.3,
    }
    for tail, value in expected.items():
        assert kl_direction(support, stats, tail=tail).item() == pytest.approx(value, rel=1e-12)


def test_the_default_tail_is_uniform() -> None:
    case = random_case(seed=13)
    stats = policy_statistics(case.logits, case.support)
    assert torch.equal(kl_direction(case.support, stats), directions(case, "uniform"))


def test_no_tail_at_all() -> None:
    # The support is the vocabulary: every tail model is the full derivative.
    case = random_case(seed=14, vocab=8, k=8)
    for tail in ("aggregated", "uniform", "exact"):
        result = directions(case, tail)
        for t in range(case.sampled.numel()):
            log_mu = case.log_mu[t]
            expected = along_step(
                lambda log_pi, log_mu=log_mu: (log_mu.exp() * (log_mu - log_pi)).sum(),
                case.logits[t],
                int(case.sampled[t]),
            )
            assert result[t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_unused_columns_are_not_counted() -> None:
    case = random_case(seed=15)
    support = case.support
    pad = torch.full((7, 2), -1)
    padded = BehaviorSupport(
        torch.cat([support.token_ids, pad], dim=-1),
        torch.cat([support.log_probs, torch.full((7, 2), math.nan).double()], dim=-1),
        support.sampled,
    )
    for tail in ("aggregated", "uniform", "exact"):
        plain = kl_direction(support, policy_statistics(case.logits, support), tail=tail)
        wide = kl_direction(padded, policy_statistics(case.logits, padded), tail=tail)
        torch.testing.assert_close(plain, wide, rtol=1e-13, atol=0)


def test_uniform_uses_the_true_vocabulary_size() -> None:
    case = random_case(seed=16, vocab=7, k=3)
    support = case.support
    stats = policy_statistics(case.logits, support)
    smaller = PolicyStatistics(**{**vars(stats), "vocab_size": 4})
    m = support.valid.sum(dim=-1)
    tail = stats.tail_prob * (support.tail_prob - stats.tail_prob)
    difference = kl_direction(support, stats) - kl_direction(support, smaller)
    expected = tail / (7 - m) - torch.where(m < 4, tail / (4 - m).clamp_min(1), 0.0)
    torch.testing.assert_close(difference, expected, rtol=1e-9, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    log_mu=st.floats(-30.0, -1e-6),
    log_pi=st.floats(-30.0, -1e-6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_binary_direction_has_the_sign_of_the_ratio_direction(
    log_mu: float, log_pi: float, dtype: torch.dtype
) -> None:
    mu, pi = torch.tensor([log_mu], dtype=dtype), torch.tensor([log_pi], dtype=dtype)
    signs = binary_kl_direction(mu, pi).sign(), ratio_direction(mu, pi).sign()
    assert torch.equal(*signs)


def test_binary_direction_is_the_derivative_of_the_binary_kl() -> None:
    case = random_case(seed=17)
    log_mu = case.log_mu.gather(-1, case.sampled[:, None]).squeeze(-1)
    support = BehaviorSupport.from_sampled(case.sampled, log_mu)
    stats = policy_statistics(case.logits, support)
    result = binary_kl_direction(log_mu, stats.log_prob)
    torch.testing.assert_close(
        result, kl_direction(support, stats, tail="aggregated"), rtol=1e-10, atol=1e-14
    )
    for t in range(7):
        mu, log_pi = log_mu[t].exp(), stats.log_prob[t]
        target = torch.stack([mu, 1 - mu])
        expected = along_step(
            lambda x, target=target: (target * (target.log() - x)).sum(),
            torch.stack([log_pi, torch.log1p(-log_pi.exp())]),
            0,
        )
        assert result[t].item() == pytest.approx(expected, rel=1e-10, abs=1e-14)


def test_near_equality_keeps_its_sign() -> None:
    # exp() of both and a subtraction gives 0 in float32.
    mu = torch.tensor([-1e-3])
    pi = torch.nextafter(mu, torch.tensor([0.0]))
    assert mu.exp() == pi.exp()
    assert (ratio_direction(mu, pi) > 0).all()
    assert (binary_kl_direction(mu, pi) > 0).all()


def test_ratio_direction_constants_and_extremes() -> None:
    value = ratio_direction(
        torch.tensor([0.25, 0.5, 0.5]).log(), torch.tensor([0.5, 0.5, 0.1]).log()
    )
    assert value.tolist() == pytest.approx([1.0, 0.0, -0.8])
    assert ratio_direction(torch.tensor([-200.0]), torch.tensor([-1.0])).item() == math.inf


def test_nan_stays_visible_and_a_wrong_tail_raises() -> None:
    case = random_case(seed=18)
    logits = case.logits.clone()
    logits[0] = math.nan
    stats = policy_statistics(logits, case.support)
    for tail in ("aggregated", "uniform", "exact"):
        result = kl_direction(case.support, stats, tail=tail)
        assert result.isnan().tolist() == [True] + [False] * 6
    with pytest.raises(ValueError, match=r"tail must be one of .* got 'certain'"):
        kl_direction(case.support, stats, tail="certain")


def test_tv_direction_by_hand() -> None:
    # n = 6, K = {0, 1}, sampled 0. mu = (.5, .2 | .3), pi = (.6, .1 | .3 = .2 + .1 + 0 + 0): the
    # signs are -, +, 0. With q the tail's square, c = .6 - .37 - q, and
    # D' = -1/2 [-.6 (.4 - c) + .1 (-.1 - c)] = -1/2 [-.25 + .5 c].
    log_pi = torch.tensor([[0.6, 0.1, 0.2, 0.1, 0.0, 0.0]], dtype=torch.float64).log()
    support = BehaviorSupport(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.5, 0.2]], dtype=torch.float64).log(),
        torch.tensor([0]),
    )
    stats = policy_statistics(log_pi, support)
    # mu_tail = 1 - .7 is not pi_tail = .3 to the last bit, and then its sign is not 0.
    stats = PolicyStatistics(**{**vars(stats), "tail_prob": support.tail_prob})
    for tail, square in {"aggregated": 0.09, "uniform": 0.09 / 4, "exact": 0.05}.items():
        expected = -0.5 * (-0.25 + 0.5 * (0.23 - square))
        assert tv_direction(support, stats, tail).item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(tv_direction(support, stats), tv_direction(support, stats, "uniform"))


def test_tv_direction_of_nan_absent_tokens_and_wrong_tails() -> None:
    case = random_case(seed=19)
    logits = case.logits.clone()
    logits[0] = math.nan
    sampled = case.sampled.clone()
    sampled[1] = -1
    support = BehaviorSupport(case.support.token_ids, case.support.log_probs, sampled)
    stats = policy_statistics(logits, support)
    for tail in ("aggregated", "uniform", "exact"):
        value = tv_direction(support, stats, tail)
        assert value.isnan().tolist() == [True, True] + [False] * 5
    with pytest.raises(ValueError, match=r"tv_direction: tail must be one of .* got 'certain'"):
        tv_direction(case.support, stats, tail="certain")


def test_directions_of_a_nearly_certain_token_keep_their_digits() -> None:
    # 1 - pi = 1e-9, 1 - mu = 3e-9, in float32, where both probabilities are 1. With two tokens
    # D'_KL = 2 (1 - pi)(pi - mu) and D'_TV = 2 pi (1 - pi)^2.
    log_mu = torch.tensor([[-3e-9, math.log(3e-9)]])
    log_pi = torch.tensor([[-1e-9, math.log(1e-9)]])
    zero = torch.tensor([0])
    support = BehaviorSupport(torch.tensor([[0, 1]]), log_mu, zero)
    stats = policy_statistics(log_pi, support)
    values = {
        4e-18: [kl_direction(support, stats), kl_direction_full(log_mu, log_pi, zero)],
        2e-18: [tv_direction(support, stats), tv_direction_full(log_mu, log_pi, zero)],
    }
    values[4e-18].append(binary_kl_direction(log_mu[:, 0], log_pi[:, 0]))
    values[2e-18].append(binary_tv_direction(log_mu[:, 0], log_pi[:, 0]))
    for expected, results in values.items():
        for result in results:
            assert result.item() == pytest.approx(expected, rel=1e-3, abs=0)


def test_directions_of_a_nearly_impossible_token_keep_their_digits() -> None:
    # The pair above with the other token sampled: pi = 1e-9, mu = 3e-9, the rest within 1e-8 of 1.
    log_mu = torch.tensor([[-3e-9, math.log(3e-9)]])
    log_pi = torch.tensor([[-1e-9, math.log(1e-9)]])
    one = torch.tensor([1])
    support = BehaviorSupport(torch.tensor([[0, 1]]), log_mu, one)
    stats = policy_statistics(log_pi, support)
    for result in (kl_direction(support, stats), kl_direction_full(log_mu, log_pi, one)):
        assert result.item() == pytest.approx(-4e-9, rel=1e-5, abs=0)
    for result in (tv_direction(support, stats), tv_direction_full(log_mu, log_pi, one)):
        assert result.item() == pytest.approx(-2e-9, rel=1e-5, abs=0)


def test_full_directions_name_wrong_arguments() -> None:
    case = random_case(seed=20)
    for direction in (kl_direction_full, tv_direction_full):
        with pytest.raises(ValueError, match=r"got \(7, 60\), \(7, 59\) and \(7,\)"):
            direction(case.log_mu, case.log_pi[:, :59], case.sampled)
        with pytest.raises(ValueError, match=r"got \(7, 60\), \(7, 60\) and \(1,\)"):
            direction(case.log_mu, case.log_pi, case.sampled[:1])
        with pytest.raises(ValueError, match=r"sampled_ids must be int64, got torch.int32"):
            direction(case.log_mu, case.log_pi, case.sampled.int())
