# SPDX-License-Identifier: Apache-2.0
"""When the directions agree and when not, and what masks follow: Eq. 12, 15, Appendix C."""

import pytest
import torch
from torch import Tensor

from pdm import (
    BehaviorSupport,
    MaskResult,
    PolicyLossConfig,
    PolicyStatistics,
    binary_kl_direction,
    binary_tv_direction,
    divergence_mask,
    full_kl,
    kl_direction,
    kl_direction_full,
    policy_loss,
    policy_statistics,
    ratio_clip_mask,
    ratio_direction,
    topk_kl,
    tv_direction,
)
from pdm.loss.config import Divergence
from tests.unit.pdm_pairs import Pairs, draw

A_MILLION = 1_000_000


def binary_statistics(log_mu: Tensor, log_pi: Tensor) -> tuple[BehaviorSupport, PolicyStatistics]:
    """The support {sampled, rest} and the statistics of a policy of two buckets."""
    support = BehaviorSupport.from_sampled(torch.zeros_like(log_mu, dtype=torch.int64), log_mu)
    rest = -torch.expm1(log_pi)
    stats = PolicyStatistics(
        log_prob=log_pi,
        support_log_probs=log_pi.unsqueeze(-1),
        tail_prob=rest,
        sum_square=log_pi.exp().square() + rest.square(),
        tail_sum_square=rest.square(),
        tail_max=rest,
        entropy=torch.zeros_like(log_pi),
        vocab_size=2,
    )
    return support, stats


def log_probs(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Probabilities of every size: near 1, near 0, and between."""
    logit = 12.0 * torch.randn(A_MILLION, generator=generator, dtype=torch.float64)
    return torch.nn.functional.logsigmoid(logit).to(dtype)


def test_appendix_c_on_a_million_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    log_mu = log_probs(generator, torch.float64)
    log_pi = log_probs(generator, torch.float64)
    expected = ratio_direction(log_mu, log_pi).sign()
    # pi rounds to 1 beyond logits of 37: no step is left, and the direction is 0.
    expected = torch.where(log_pi == 0, 0.0, expected)
    assert (expected == 0).double().mean() < 0.01
    support, stats = binary_statistics(log_mu, log_pi)
    assert torch.equal(kl_direction(support, stats, "aggregated").sign(), expected)
    assert torch.equal(binary_kl_direction(log_mu, log_pi).sign(), expected)
    assert torch.equal(tv_direction(support, stats, "aggregated").sign(), expected)
    assert torch.equal(binary_tv_direction(log_mu, log_pi).sign(), expected)


def test_appendix_c_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    log_mu, log_pi = (log_probs(generator, torch.float32) for _ in range(2))
    expected = torch.where(log_pi == 0, 0.0, ratio_direction(log_mu, log_pi).sign())
    assert torch.equal(binary_kl_direction(log_mu, log_pi).sign(), expected)
    # (1 - pi)^2 underflows where 1 - pi is below 1e-22.
    expected = torch.where(torch.expm1(log_pi).square() == 0, 0.0, expected)
    assert torch.equal(binary_tv_direction(log_mu, log_pi).sign(), expected)


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_binary_divergences_make_one_mask_of_both_directions(kind: str) -> None:
    pairs = draw("spread", seed=50, tokens=4000, vocab=40, k=4)
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    advantages = torch.randn(4000, generator=torch.Generator().manual_seed(2))
    divergence: Divergence = "binary_kl" if kind == "kl" else "binary_tv"
    ratio, aggregated = (
        policy_loss(
            stats,
            support,
            advantages,
            PolicyLossConfig(divergence=divergence, direction=direction, threshold=0.05),
        ).mask
        for direction in ("ratio", "aggregated")
    )
    assert torch.equal(ratio.keep, aggregated.keep)
    assert 100 < (~ratio.keep).sum() < 3900


@pytest.mark.parametrize("k", [1, 8, 30])
def test_gap_between_the_two_tail_models(k: int) -> None:
    pairs = draw("spread", seed=51, tokens=2000, vocab=60, k=k)
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    unseen = 60 - support.valid.sum(dim=-1)
    expected = (
        (1.0 - 1.0 / unseen.double()) * stats.tail_prob * (support.tail_prob - stats.tail_prob)
    )
    gap = kl_direction(support, stats, "aggregated") - kl_direction(support, stats, "uniform")
    torch.testing.assert_close(gap, expected, rtol=1e-9, atol=1e-14)


def average_gap(pairs: Pairs, tail: str) -> Tensor:
    """E_{i ~ pi}[pi_i - mu_i] over the vocabulary, or with the tail as one token or spread out."""
    mu, pi = pairs.log_mu.exp(), pairs.log_pi.exp()
    if tail == "full":
        return (pi * (pi - mu)).sum(dim=-1)
    support = pairs.support()
    ids = torch.where(support.valid, support.token_ids, 0)
    inside = torch.zeros_like(mu, dtype=torch.int64).scatter_add(-1, ids, support.valid.long()) > 0
    head = torch.where(inside, pi * (pi - mu), 0.0).sum(dim=-1)
    pi_tail, mu_tail = (torch.where(inside, 0.0, x).sum(dim=-1) for x in (pi, mu))
    count = 1 if tail == "aggregated" else (~inside).sum(dim=-1)
    return head + pi_tail * (pi_tail - mu_tail) / count


@pytest.mark.parametrize("tail", ["full", "aggregated", "uniform"])
@pytest.mark.parametrize("regime", ["flat", "spread", "heavy_tail"])
def test_masks_differ_exactly_on_the_disagreement_set(tail: str, regime: str) -> None:
    pairs = draw(regime, seed=52, tokens=40_000, vocab=40, k=6)
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    own_gap = stats.log_prob.exp() - support.sampled_log_probs.exp()
    average = average_gap(pairs, tail)
    disagree = ((own_gap > 0) & (own_gap < average)) | ((own_gap < 0) & (own_gap > average))

    if tail == "full":
        divergence = full_kl(pairs.log_mu, pairs.log_pi)
        direction = kl_direction_full(pairs.log_mu, pairs.log_pi, pairs.sampled)
    else:
        divergence = topk_kl(support, stats)
        direction = kl_direction(support, stats, tail)  # type: ignore[arg-type]
    threshold = divergence.median().item()
    advantages = torch.randn(40_000, generator=torch.Generator().manual_seed(3))
    ratio = ratio_direction(support.sampled_log_probs, stats.log_prob)
    dppo = divergence_mask(advantages, divergence, ratio, threshold)
    predictive = divergence_mask(advantages, divergence, direction, threshold)

    differ = dppo.keep != predictive.keep
    assert torch.equal(differ, disagree & (divergence > threshold))
    assert 20 < differ.sum() < 20_000
    assert torch.equal(dppo.outside, predictive.outside)


def mask_of(pairs: Pairs, advantages: Tensor, **settings: object) -> MaskResult:
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    config = PolicyLossConfig(**settings)  # type: ignore[arg-type]
    return policy_loss(stats, support, advantages, config).mask


@pytest.mark.parametrize(
    ("divergence", "direction"),
    [
        ("topk_kl", "ratio"),
        ("topk_kl", "aggregated"),
        ("topk_kl", "uniform"),
        ("topk_kl", "exact"),
        ("topk_kl", "certified"),
        ("topk_tv", "ratio"),
        ("topk_tv", "aggregated"),
        ("topk_tv", "uniform"),
        ("topk_tv", "exact"),
        ("binary_kl", "ratio"),
        ("binary_kl", "aggregated"),
        ("binary_tv", "ratio"),
        ("binary_tv", "aggregated"),
    ],
)
def test_every_divergence_mask_is_one_sided(divergence: str, direction: str) -> None:
    pairs = draw("spread", seed=53, tokens=2000, vocab=40, k=6)
    up = torch.ones(2000)
    settings = {"divergence": divergence, "direction": direction, "threshold": 0.1}
    raise_it, lower_it = (mask_of(pairs, sign * up, **settings) for sign in (1.0, -1.0))
    # Both see the same region; of two opposite updates at most one is vetoed, and outside exactly
    # one, unless the direction is 0.
    assert torch.equal(raise_it.outside, lower_it.outside)
    assert not (raise_it.outward & lower_it.outward).any()
    vetoes = (~raise_it.keep).long() + (~lower_it.keep).long()
    assert torch.equal(vetoes.bool(), raise_it.outside)
    assert 100 < raise_it.outside.sum() < 1900
    assert mask_of(pairs, 0.0 * up, **settings).keep.all()


def test_no_mask_keeps_all_and_the_ratio_clip_comes_in_two_shapes() -> None:
    pairs = draw("spread", seed=54, tokens=2000, vocab=40, k=6)
    advantages = torch.randn(2000, generator=torch.Generator().manual_seed(4))
    assert mask_of(pairs, advantages, mask="none").keep.all()
    support = pairs.support()
    log_prob = policy_statistics(pairs.policy, support).log_prob
    ratio = (log_prob - support.sampled_log_probs).exp()
    for low, high in ((0.2, 0.2), (0.2, 0.28)):
        mask = mask_of(pairs, advantages, mask="ratio_clip", clip_low=low, clip_high=high)
        outside = (ratio < 1 - low) | (ratio > 1 + high)
        assert torch.equal(mask.outside, outside)
        assert torch.equal(mask.keep, ~(outside & (advantages * (ratio - 1) > 0)))
        alone = ratio_clip_mask(advantages, support.sampled_log_probs, log_prob, low=low, high=high)
        assert torch.equal(mask.keep, alone.keep)
