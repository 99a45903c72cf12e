# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdm import (
    BehaviorSupport,
    PolicyStatistics,
    binary_kl,
    binary_tv,
    full_kl,
    full_tv,
    policy_statistics,
    topk_kl,
    topk_tv,
)
from tests.unit.pdm_cases import Case, log1mexp, random_case, textbook_topk_kl
from tests.unit.pdm_cases import full_kl as plain_full_kl

INF = math.inf
SEEDS = st.integers(0, 10_000)


def statistics(support_log_probs: torch.Tensor, tail_prob: torch.Tensor) -> PolicyStatistics:
    """Only the two fields that a divergence reads."""
    nothing = torch.full_like(tail_prob, math.nan)
    return PolicyStatistics(
        log_prob=nothing,
        support_log_probs=support_log_probs,
        tail_prob=tail_prob,
        sum_square=nothing,
        tail_sum_square=nothing,
        tail_max=nothing,
        entropy=nothing,
        vocab_size=100,
    )


def support_of(probs: list[float], dtype: torch.dtype = torch.float64) -> BehaviorSupport:
    log_probs = torch.tensor([probs], dtype=dtype).log()
    return BehaviorSupport(
        torch.arange(len(probs)).unsqueeze(0), log_probs, torch.zeros(1, dtype=torch.int64)
    )


def policy_of(
    probs: list[float], tail: float, dtype: torch.dtype = torch.float64
) -> PolicyStatistics:
    return statistics(torch.tensor([probs], dtype=dtype).log(), torch.tensor([tail], dtype=dtype))


def test_topk_kl_is_behavior_to_policy() -> None:
    # mu = (1/2, 1/4 | 1/4), pi = (1/4, 1/4 | 1/2): 1/2 log 2 - 1/4 log 2. The reverse KL of this
    # pair is equal, so a second one pins the direction: 0.5108 forward, 0.3681 reverse.
    value = topk_kl(support_of([0.5, 0.25]), policy_of([0.25, 0.25], 0.5))
    assert value.item() == pytest.approx(0.25 * math.log(2), rel=1e-14)
    value = topk_kl(support_of([0.5, 0.5]), policy_of([0.9, 0.1], 0.0))
    assert value.item() == pytest.approx(0.5 * math.log(1 / 1.8) + 0.5 * math.log(5), rel=1e-14)
    assert binary_kl(torch.tensor([0.5]).log(), torch.tensor([0.9]).log()).item() == pytest.approx(
        0.5108256, rel=1e-6
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    k=st.integers(1, 12),
    scale=st.floats(0.1, 8.0),
    distance=st.floats(1e-3, 5.0),
)
def test_topk_kl_against_the_textbook_sum(seed: int, k: int, scale: float, distance: float) -> None:
    case = random_case(seed, tokens=3, vocab=30, k=k, scale=scale, distance=distance)
    value = topk_kl(case.support, policy_statistics(case.logits, case.support))
    for t in range(3):
        expected = textbook_topk_kl(case.log_mu[t], case.log_pi[t], case.kept_ids(t))
        # The textbook sum itself is only good to rounding of its largest terms.
        torch.testing.assert_close(value[t], expected, rtol=1e-10, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, k=st.integers(1, 12), distance=st.floats(0.0, 6.0))
def test_topk_kl_lies_between_zero_and_the_full_kl(seed: int, k: int, distance: float) -> None:
    case = random_case(seed, tokens=4, vocab=30, k=k, distance=distance)
    value = topk_kl(case.support, policy_statistics(case.logits, case.support))
    assert (value >= 0).all()
    assert (value <= plain_full_kl(case.log_mu, case.log_pi) * (1 + 1e-9) + 1e-14).all()


def test_topk_kl_with_the_whole_vocabulary_is_the_full_kl() -> None:
    case = random_case(seed=3, vocab=12, k=12)
    value = topk_kl(case.support, policy_statistics(case.logits, case.support))
    # mu_tail is rounding noise of 1e-16 here, against the floor of an empty pi_tail.
    torch.testing.assert_close(value, plain_full_kl(case.log_mu, case.log_pi), rtol=0, atol=1e-12)


def test_topk_kl_is_zero_at_equality() -> None:
    case = random_case(seed=4, distance=0.0)
    value = topk_kl(case.support, policy_statistics(case.logits, case.support))
    assert (value >= 0).all()
    assert (value < 1e-28).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_kl_near_equality_is_quadratic(dtype: torch.dtype) -> None:
    # mu = (1/2 + e, 1/4 - e | 1/4), pi = (1/2, 1/4 | 1/4): D = e^2/2 (1/(1/2) + 1/(1/4)) + O(e^3).
    # The textbook form in float32 returns anything between -6e-8 and 6e-8.
    e = 2.0**-14
    value = topk_kl(support_of([0.5 + e, 0.25 - e], dtype), policy_of([0.5, 0.25], 0.25, dtype))
    assert value.item() == pytest.approx(3 * e * e, rel=3e-3, abs=0)


def test_topk_kl_tail_keeps_its_accuracy_at_a_mass_of_1e_12() -> None:
    # float32 in and out; mu_tail = 2e-12 against pi_tail = 1e-12.
    mu_head, pi_tail = -2e-12, 1e-12
    support = BehaviorSupport(
        torch.tensor([[0]]), torch.tensor([[mu_head]]), torch.zeros(1, dtype=torch.int64)
    )
    stats = statistics(torch.tensor([[-pi_tail]]), torch.tensor([pi_tail]))
    expected = 2e-12 * math.log(2) - 1e-12
    assert topk_kl(support, stats).item() == pytest.approx(expected, rel=1e-4, abs=0)


def test_truncated_sums_do_not_make_it_negative() -> None:
    # Sums of 0.8 and 0.95 over the same four tokens: without the tail the sum is -0.137.
    value = topk_kl(support_of([0.5, 0.1, 0.1, 0.1]), policy_of([0.55, 0.2, 0.1, 0.1], 0.05))
    head = 0.5 * math.log(0.5 / 0.55) + 0.1 * math.log(0.1 / 0.2)
    assert value.item() == pytest.approx(head + 0.2 * math.log(0.2 / 0.05), rel=1e-12)
    assert head < 0 < value.item()


def test_head_beyond_mass_one_has_no_tail_and_stays_nonnegative() -> None:
    support = support_of([0.7, 0.302])
    assert support.tail_prob.item() == 0.0
    value = topk_kl(support, policy_of([0.7, 0.3], 0.0))
    assert 0 <= value.item() < 1e-5


def test_topk_kl_extremes() -> None:
    # A token that only the policy calls impossible.
    assert topk_kl(support_of([0.5, 0.5]), policy_of([1.0, 0.0], 0.0)).item() == INF
    # A token that only the behaviour calls impossible: 0 log 0.
    value = topk_kl(support_of([1.0, 0.0]), policy_of([0.5, 0.5], 0.0))
    assert value.item() == pytest.approx(math.log(2))
    # Rounding noise in mu_tail against a tail that underflowed must not veto by +inf.
    value = topk_kl(support_of([1 - 1e-7], torch.float32), policy_of([1.0], 0.0, torch.float32))
    assert 0 < value.item() < 2e-5
    # Policy log-probabilities far below the range of exp.
    stats = statistics(torch.tensor([[-2000.0, 0.0]]).double(), torch.zeros(1).double())
    assert topk_kl(support_of([0.5, 0.5]), stats).item() == pytest.approx(1000 - math.log(2))
    assert topk_kl(support_of([0.5]), policy_of([math.nan], 0.5)).isnan().all()


def test_unused_columns_add_exactly_nothing() -> None:
    # -inf - (-inf), or a padding of -1e10 against 0, poisoned value and gradient elsewhere.
    plain = topk_kl(support_of([0.5, 0.25]), policy_of([0.3, 0.4], 0.3))
    for behavior_pad, policy_pad in ((-INF, -INF), (0.0, -1e10), (-INF, 0.0), (math.nan, 0.0)):
        mu = torch.tensor([[math.log(0.5), math.log(0.25), behavior_pad]], dtype=torch.float64)
        pi = torch.tensor([[math.log(0.3), math.log(0.4), policy_pad]], dtype=torch.float64)
        pi.requires_grad_()
        support = BehaviorSupport(torch.tensor([[0, 1, -1]]), mu, torch.tensor([0]))
        value = topk_kl(support, statistics(pi, torch.tensor([0.3], dtype=torch.float64)))
        torch.testing.assert_close(value, plain, rtol=0, atol=0)
        value.sum().backward()
        assert pi.grad is not None
        assert pi.grad[0, 2] == 0
        assert pi.grad.isfinite().all()


def test_topk_kl_of_low_precision_logits() -> None:
    # Float32 statistics of the paper's shape, against float64 throughout.
    case = random_case(seed=6, tokens=4, vocab=5000, k=20, scale=3.0)
    single = Case(case.logits.float(), case.log_mu.float(), case.sampled, case.k)
    value = topk_kl(single.support, policy_statistics(single.logits, single.support))
    assert value.dtype == torch.float32
    expected = topk_kl(case.support, policy_statistics(case.logits, case.support))
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("log_mu", [-1e-9, -1e-4, -0.3, -0.8, -5.0, -30.0])
@pytest.mark.parametrize("log_pi", [-2e-9, -1.3e-4, -0.31, -0.9, -7.0, -33.0])
def test_binary_kl_against_both_buckets(log_mu: float, log_pi: float) -> None:
    mu = math.exp(log_mu)
    rest = -math.expm1(log_mu) * (log1mexp(log_mu) - log1mexp(log_pi))
    expected = mu * (log_mu - log_pi) + rest
    value = binary_kl(
        torch.tensor([log_mu], dtype=torch.float64), torch.tensor([log_pi], dtype=torch.float64)
    )
    largest = max(abs(mu * (log_mu - log_pi)), abs(rest))
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-14 * largest)
    assert value.item() >= 0
    single = binary_kl(torch.tensor([log_mu]), torch.tensor([log_pi]))
    assert single.item() == pytest.approx(expected, rel=1e-4, abs=0)


def test_binary_kl_extremes() -> None:
    log_prob = torch.tensor([-1e-9, -0.5, -40.0])
    assert (binary_kl(log_prob, log_prob) == 0).all()
    # mu = 1, and above it by rounding: only -log pi is left.
    value = binary_kl(torch.tensor([0.0, 1e-7]), torch.tensor([-0.5, -0.5]))
    assert value.tolist() == pytest.approx([0.5, 0.5])
    # pi rounded to 1 while 1 - mu = 1e-6: large against 1e-6, but no infinity.
    value = binary_kl(torch.tensor([-1e-6]), torch.tensor([0.0]))
    assert 0 < value.item() < 1e-4
    assert binary_kl(torch.tensor([-0.5]), torch.tensor([-INF])).item() == INF
    assert binary_kl(torch.tensor([-INF]), torch.tensor([math.log(0.5)])).item() == pytest.approx(
        math.log(2)
    )
    assert binary_kl(torch.tensor([math.nan]), torch.tensor([-0.5])).isnan().all()


def test_binary_kl_is_topk_kl_on_the_binary_support() -> None:
    case = random_case(seed=8)
    log_mu = case.log_mu.gather(-1, case.sampled[:, None]).squeeze(-1)
    support = BehaviorSupport.from_sampled(case.sampled, log_mu)
    stats = policy_statistics(case.logits, support)
    torch.testing.assert_close(
        binary_kl(log_mu, stats.log_prob), topk_kl(support, stats), rtol=1e-10, atol=1e-15
    )


def test_binary_kl_gradient_is_finite_and_right() -> None:
    log_mu = torch.tensor([-0.2, -1.0, -3.0], dtype=torch.float64)
    log_pi = torch.tensor([-0.25, -0.4, -6.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: binary_kl(log_mu, x), (log_pi,))


def test_topk_tv_by_hand() -> None:
    # mu = (1/2, 1/4 | 1/4), pi = (1/4, 3/8 | 3/8): (1/4 + 1/8 + 1/8) / 2.
    value = topk_tv(support_of([0.5, 0.25]), policy_of([0.25, 0.375], 0.375))
    assert value.item() == pytest.approx(0.25, rel=1e-14)
    # Disjoint policies are as far apart as can be, and a head beyond mass 1 is no further.
    assert topk_tv(support_of([1.0, 0.0]), policy_of([0.0, 1.0], 0.0)).item() == 1.0
    assert topk_tv(support_of([1.001, 0.0]), policy_of([0.0, 1.0], 0.0)).item() == 1.0
    assert topk_tv(support_of([0.5]), policy_of([math.nan], 0.5)).isnan().all()


def test_total_variations_against_the_textbook_sums() -> None:
    case = random_case(seed=31, tokens=40, k=5)
    mu, pi = case.log_mu.exp(), case.log_pi.exp()
    full = 0.5 * (mu - pi).abs().sum(dim=-1)
    torch.testing.assert_close(full_tv(case.log_mu, case.log_pi), full, rtol=1e-12, atol=1e-15)
    value = topk_tv(case.support, policy_statistics(case.logits, case.support))
    for t in range(40):
        kept = case.kept_ids(t)
        tail = [j for j in range(60) if j not in kept]
        expected = 0.5 * (mu[t, kept] - pi[t, kept]).abs().sum()
        expected = expected + 0.5 * (mu[t, tail].sum() - pi[t, tail].sum()).abs()
        torch.testing.assert_close(value[t], expected, rtol=1e-12, atol=1e-15)
    assert (value <= full + 1e-15).all()
    own = case.sampled[:, None]
    torch.testing.assert_close(
        binary_tv(case.log_mu.gather(-1, own), case.log_pi.gather(-1, own)),
        (mu - pi).abs().gather(-1, own),
        rtol=1e-10,
        atol=1e-16,
    )


def test_total_variations_near_equality_and_near_one() -> None:
    # 1 - 1e-9 against 1 - 3e-9: float32 holds both logarithms, and neither probability.
    log_mu, log_pi = torch.tensor([-1e-9]), torch.tensor([-3e-9])
    assert binary_tv(log_mu, log_pi).item() == pytest.approx(2e-9, rel=1e-5, abs=0)
    pair = torch.tensor([[-1e-9, math.log(1e-9)]]), torch.tensor([[-3e-9, math.log(3e-9)]])
    assert full_tv(*pair).item() == pytest.approx(2e-9, rel=1e-5, abs=0)
    expected = 1e-9 * math.log(1 / 3) + 2e-9
    assert full_kl(*pair).item() == pytest.approx(expected, rel=1e-4, abs=0)
    assert binary_tv(torch.tensor([0.1]), torch.tensor([0.2])).item() == 0.0  # both round to 1
    assert binary_tv(torch.tensor([-INF]), torch.tensor([0.0])).item() == 1.0
    assert binary_tv(torch.tensor([math.nan]), torch.tensor([-0.5])).isnan().all()


def test_full_divergences_take_padded_columns() -> None:
    case = random_case(seed=32)
    pad = torch.full((7, 3), -INF, dtype=torch.float64)
    padded = [torch.cat([x, pad], dim=-1) for x in (case.log_mu, case.log_pi)]
    for divergence in (full_kl, full_tv):
        plain = divergence(case.log_mu, case.log_pi)
        torch.testing.assert_close(divergence(*padded), plain, rtol=1e-14, atol=0)
        assert (divergence(case.log_mu, case.log_mu) == 0).all()
        policy = padded[1].clone().requires_grad_()
        divergence(padded[0], policy).sum().backward()
        assert policy.grad is not None
        assert policy.grad.isfinite().all()
        with pytest.raises(ValueError, match=r"must both be \[T, V\], got \(7, 60\) and \(7, 63\)"):
            divergence(case.log_mu, padded[1])
    torch.testing.assert_close(
        full_kl(case.log_mu, case.log_pi), plain_full_kl(case.log_mu, case.log_pi)
    )
    # Impossible for the policy alone: infinitely far in KL, and just that much in TV.
    log_mu = torch.tensor([[0.5, 0.5]]).log()
    log_pi = torch.tensor([[0.0, -INF]])
    assert full_kl(log_mu, log_pi).item() == INF
    assert full_tv(log_mu, log_pi).item() == pytest.approx(0.5)


def test_topk_gradient_is_finite_where_the_behavior_has_no_tail() -> None:
    # log(0 / pi_tail) is -inf, and where() hands 0 * inf back through it.
    pi = torch.tensor([[0.6, 0.3]], dtype=torch.float64).log().requires_grad_()
    tail = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    support = support_of([0.7, 0.302])
    assert support.tail_prob.item() == 0.0
    topk_kl(support, statistics(pi, tail)).sum().backward()
    assert pi.grad is not None
    assert tail.grad is not None
    assert pi.grad.isfinite().all()
    assert tail.grad.item() == pytest.approx(1.0)  # of -mu + pi, the rest being empty
