# SPDX-License-Identifier: Apache-2.0
"""The certified interval holds the full-vocabulary derivative, and the decision follows it."""

import math
from dataclasses import replace

import pytest
import torch

from pdm import (
    BehaviorSupport,
    PolicyStatistics,
    certified_kl_direction,
    kl_direction,
    kl_direction_bounds,
    kl_direction_full,
    policy_statistics,
)
from tests.unit.pdm_cases import random_case
from tests.unit.pdm_pairs import Pairs, batches, draw

DTYPES = [torch.float64, torch.float32]


def reported(pairs: Pairs, dtype: torch.dtype) -> tuple[BehaviorSupport, PolicyStatistics]:
    """What engine and trainer would hand over if both computed and stored in ``dtype``."""
    support = pairs.support(dtype)
    return support, policy_statistics(pairs.policy.to(dtype), support)


def truth(pairs: Pairs) -> torch.Tensor:
    """The derivative of the full KL of the unrounded policies, in float64."""
    return kl_direction_full(pairs.log_mu, pairs.log_pi, pairs.sampled)


def assert_contains(pairs: Pairs, dtype: torch.dtype, name: str) -> None:
    support, stats = reported(pairs, dtype)
    lower, upper = kl_direction_bounds(support, stats)
    assert lower.dtype == upper.dtype == dtype
    expected = truth(pairs)
    outside = (expected < lower.double()) | (expected > upper.double())
    assert not outside.any(), f"{name}: {int(outside.sum())} of {len(expected)} outside"
    result = certified_kl_direction(support, stats)
    assert torch.equal(result.certified, (lower > 0) | (upper < 0))
    sure = result.certified
    assert torch.equal(result.direction[sure].sign().double(), expected[sure].sign()), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_interval_holds_the_full_derivative(dtype: torch.dtype) -> None:
    for name, pairs in batches(200_000):
        assert_contains(pairs, dtype, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_interval_holds_the_full_derivative_a_million_times(dtype: torch.dtype) -> None:
    for name, pairs in batches(1_000_000, first_seed=1_000):
        assert_contains(pairs, dtype, name)


def test_the_bounds_are_attained() -> None:
    # Not certified by being wide: on these pairs the interval has no room left at its upper end.
    for regime in ("spike_on_the_next", "one_unseen_token", "flat_tail"):
        pairs = draw(regime, seed=1, tokens=2000, vocab=60, k=8)
        pairs = replace(pairs, sampled=torch.zeros_like(pairs.sampled))
        lower, upper = kl_direction_bounds(*reported(pairs, torch.float64))
        room = (upper - truth(pairs)) / (upper - lower)
        assert room.amin() < 1e-4, regime


def test_a_sampled_token_below_the_top_k_bounds_nothing() -> None:
    # mu = (.4, .3, .2, .0999, .0001), K = 2. Token 4 is sampled, so token 2 is unseen and likelier;
    # taking mu_4 for the least of the top K would claim that no unseen token exceeds 1e-4.
    mu = torch.tensor([[0.4, 0.3, 0.2, 0.0999, 0.0001]], dtype=torch.float64)
    pi = torch.tensor([[0.2, 0.1, 0.6, 0.05, 0.05]], dtype=torch.float64)
    sampled = torch.tensor([4])
    support = BehaviorSupport.from_topk(
        torch.tensor([[0, 1]]), mu[:, :2].log(), sampled, mu[:, 4].log()
    )
    assert support.topk_floor.exp().item() == pytest.approx(0.3)
    lower, upper = kl_direction_bounds(support, policy_statistics(pi.log(), support))
    expected = kl_direction_full(mu.log(), pi.log(), sampled)
    assert (lower <= expected).all()
    assert (expected <= upper).all()
    # An engine that lists the sampled token first among K + 1 entries says no more than that.
    listed = BehaviorSupport.from_topk(
        torch.tensor([[4, 0, 1]]), mu[:, [4, 0, 1]].log(), sampled, mu[:, 4].log()
    )
    assert torch.equal(listed.topk_floor, support.topk_floor)


def test_topk_floor() -> None:
    ids = torch.tensor([[7, 3, 5], [7, 3, 5], [7, -1, -1], [7, 3, -1]])
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]] * 4)
    support = BehaviorSupport(ids, log_probs, torch.tensor([3, 5, 7, 9]))
    assert support.topk_floor.tolist() == [-3.0, -2.0, 0.0, -2.0]


def test_hand_worked_interval() -> None:
    # n = 5, K = {0, 1}, sampled 0; mu = (.5, .2 | .15, .1, .05), pi = (.4, .3 | .2, .1, 0).
    # known = -.1 + .4(.1) + .3(-.1) - (.04 + .01) = -.14; the truth adds .2(.15) + .1(.1) = .04.
    # mu_bar = .2 (token 1), pi_tail = .3, pi_max = .2, mu_tail = .3: .06, .06, sqrt(.2 .3 .05).
    mu = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]], dtype=torch.float64).log()
    pi = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]], dtype=torch.float64).log()
    support = BehaviorSupport(torch.tensor([[0, 1]]), mu[:, :2], torch.tensor([0]))
    lower, upper = kl_direction_bounds(support, policy_statistics(pi, support))
    assert lower.item() == pytest.approx(-0.14, abs=1e-13)
    assert upper.item() == pytest.approx(-0.14 + math.sqrt(0.003), abs=1e-13)
    assert kl_direction_full(mu, pi, torch.tensor([0])).item() == pytest.approx(-0.10, abs=1e-13)
    result = certified_kl_direction(support, policy_statistics(pi, support))
    assert result.certified.tolist() == [True]
    # exact: mu_tail = pi_tail, so -.1 + .4(.1) + .3(-.1) = -.09, inside the interval.
    assert result.direction.item() == pytest.approx(-0.09, abs=1e-13)


def test_exact_is_moved_into_the_interval_where_it_is_outside() -> None:
    # The policy's tail is one token, which mu_bar calls unlikely; exact gives it all of mu_tail.
    moved = 0
    for regime in ("one_unseen_token", "disjoint", "heavy_tail"):
        pairs = draw(regime, seed=3, tokens=3000, vocab=60, k=5)
        support, stats = reported(pairs, torch.float64)
        lower, upper = kl_direction_bounds(support, stats)
        exact = kl_direction(support, stats, tail="exact")
        direction = certified_kl_direction(support, stats).direction
        inside = (lower <= exact) & (exact <= upper)
        torch.testing.assert_close(direction[inside], exact[inside], rtol=0, atol=0)
        assert ((lower <= direction) & (direction <= upper)).all()
        moved += int((~inside).sum())
    assert moved > 100


def test_the_whole_vocabulary_leaves_only_the_slack() -> None:
    case = random_case(seed=5, vocab=12, k=12)
    lower, upper = kl_direction_bounds(case.support, policy_statistics(case.logits, case.support))
    expected = kl_direction_full(case.log_mu, case.log_pi, case.sampled)
    assert (lower <= expected).all()
    assert (expected <= upper).all()
    assert (upper - lower).max() < 1e-13


def test_binary_support_knows_no_top_k() -> None:
    pairs = draw("spread", seed=6, tokens=2000, vocab=50, k=1)
    own = pairs.log_mu.gather(-1, pairs.sampled[:, None]).squeeze(-1)
    support = BehaviorSupport.from_sampled(pairs.sampled, own)
    assert (support.topk_floor == 0).all()
    lower, upper = kl_direction_bounds(support, policy_statistics(pairs.policy, support))
    expected = truth(pairs)
    assert ((lower <= expected) & (expected <= upper)).all()


def test_the_slack_is_needed_in_float32_and_covers_the_engines_rounding() -> None:
    # With bounds made from the float32 numbers as if these were exact, some pairs fall outside.
    pairs = draw("peaked", seed=7, tokens=5000, vocab=60, k=8)
    support, stats = reported(pairs, torch.float32)
    as_if_exact = BehaviorSupport(support.token_ids, support.log_probs.double(), support.sampled)
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in vars(stats).items()
    }
    lower, upper = kl_direction_bounds(as_if_exact, PolicyStatistics(**wide))
    expected = truth(pairs)
    assert ((expected < lower) | (expected > upper)).sum() > 100
    assert_contains(pairs, torch.float32, "peaked")


@pytest.mark.parametrize("sign", [-1.0, 1.0, None])
def test_the_interval_survives_the_whole_error_that_the_slack_allows(sign: float | None) -> None:
    # Real rounding stays far below the claim; here every number is off by almost all of it.
    eps = torch.finfo(torch.float32).eps
    generator = torch.Generator().manual_seed(11)

    def off(values: torch.Tensor, by: float) -> torch.Tensor:
        random = torch.randn(values.shape, generator=generator, dtype=torch.float64).sign()
        return by * eps * (random if sign is None else sign)

    def moved(log_probs: torch.Tensor) -> torch.Tensor:
        return (log_probs * (1.0 + off(log_probs, 0.4)) + off(log_probs, 15.0)).float()

    for name, pairs in batches(60_000, first_seed=500):
        support, stats = reported(pairs, torch.float64)
        record = BehaviorSupport(support.token_ids, moved(support.log_probs), support.sampled)
        rounded = PolicyStatistics(
            log_prob=moved(stats.log_prob),
            support_log_probs=moved(stats.support_log_probs),
            tail_prob=(stats.tail_prob * (1.0 + off(stats.tail_prob, 15.0))).float(),
            sum_square=stats.sum_square.float(),
            tail_sum_square=(stats.tail_sum_square * (1.0 + off(stats.tail_prob, 30.0))).float(),
            tail_max=(stats.tail_max * (1.0 + off(stats.tail_prob, 15.0))).float(),
            entropy=stats.entropy.float(),
            vocab_size=stats.vocab_size,
        )
        lower, upper = kl_direction_bounds(record, rounded)
        expected = truth(pairs)
        assert ((lower <= expected) & (expected <= upper)).all(), name


def test_nan_is_not_certified_and_stays_visible() -> None:
    case = random_case(seed=8)
    logits = case.logits.clone()
    logits[0] = math.nan
    support = case.support
    log_probs = support.log_probs.clone()
    log_probs[1, 2] = math.nan
    support = BehaviorSupport(support.token_ids, log_probs, support.sampled)
    stats = policy_statistics(logits, support)
    for bound in kl_direction_bounds(support, stats):
        assert bound.isnan().tolist() == [True, True] + [False] * 5
    result = certified_kl_direction(support, stats)
    assert result.direction.isnan().tolist() == [True, True] + [False] * 5
    assert not result.certified[:2].any()


def test_equal_policies_are_not_certified() -> None:
    case = random_case(seed=9, distance=0.0)
    result = certified_kl_direction(case.support, policy_statistics(case.logits, case.support))
    assert not result.certified.any()


def test_bounds_carry_no_gradient_and_keep_leading_shapes() -> None:
    case = random_case(seed=10, tokens=6)
    flat = case.support
    support = BehaviorSupport(
        flat.token_ids.view(2, 3, -1), flat.log_probs.view(2, 3, -1), flat.sampled.view(2, 3)
    )
    logits = case.logits.view(2, 3, -1).requires_grad_()
    stats = policy_statistics(logits, support)
    expected = kl_direction_bounds(flat, policy_statistics(case.logits, flat))
    for folded, plain in zip(kl_direction_bounds(support, stats), expected, strict=True):
        assert not folded.requires_grad
        assert torch.equal(folded, plain.view(2, 3))
