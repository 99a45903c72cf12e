# SPDX-License-Identifier: Apache-2.0
"""What holds for every input; test_pdm_public_functions.py asks that nothing is left out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdm
from pdm import (
    BehaviorSupport,
    MaskResult,
    PolicyLossConfig,
    VocabShard,
    binary_kl,
    binary_kl_direction,
    binary_tv,
    binary_tv_direction,
    certified_kl_direction,
    divergence_mask,
    full_kl,
    full_tv,
    group_advantages,
    kl_direction,
    kl_direction_bounds,
    kl_direction_full,
    mask_counts,
    policy_loss,
    policy_statistics,
    raise_on_non_finite,
    ratio_clip_mask,
    ratio_direction,
    reference_kl,
    reference_kl_slope,
    token_weights,
    topk_kl,
    topk_tv,
    tv_direction,
    tv_direction_full,
)
from tests.unit.pdm_pairs import REGIMES, Pairs, draw

few = settings(max_examples=15, deadline=None, derandomize=True)
SEEDS = st.integers(0, 100_000)
DTYPES = st.sampled_from([torch.float32, torch.float64])
PAIRS = st.builds(
    draw,
    regime=st.sampled_from(sorted(REGIMES)),
    seed=SEEDS,
    tokens=st.integers(0, 20),
    vocab=st.integers(12, 40),
    k=st.integers(1, 10),
)
LOG_PROBS = st.lists(st.floats(-50.0, 0.0), min_size=1, max_size=8)


def numbers(seed: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics(pairs: Pairs, dtype: torch.dtype) -> tuple[BehaviorSupport, pdm.PolicyStatistics]:
    support = pairs.support(dtype)
    return support, policy_statistics(pairs.policy.to(dtype), support)


@few
@given(pairs=PAIRS, dtype=DTYPES)
def test_divergences_are_ordered(pairs: Pairs, dtype: torch.dtype) -> None:
    # Merging tokens into buckets loses divergence: binary <= top-K <= full, and Pinsker's bound.
    support, stats = statistics(pairs, dtype)
    slack = 100 * torch.finfo(dtype).eps
    kl, tv = topk_kl(support, stats), topk_tv(support, stats)
    assert kl.dtype == tv.dtype == dtype
    assert (kl >= 0).all()
    assert ((tv >= 0) & (tv <= 1)).all()
    own = support.sampled_log_probs, stats.log_prob
    assert (binary_kl(*own) <= kl * (1 + slack) + 1e3 * slack).all()
    assert (binary_tv(*own) <= tv + slack).all()
    assert (kl <= full_kl(pairs.log_mu, pairs.log_pi) * (1 + 1e3 * slack) + 1e3 * slack).all()
    assert (tv <= full_tv(pairs.log_mu, pairs.log_pi) + slack).all()
    assert (tv <= (kl / 2).sqrt() + 10 * slack**0.5).all()


@few
@given(mu=LOG_PROBS, shift=st.floats(-3.0, 3.0), dtype=DTYPES)
def test_binary_functions_follow_the_ratio(
    mu: list[float], shift: float, dtype: torch.dtype
) -> None:
    log_mu = torch.tensor(mu, dtype=dtype)
    log_pi = (log_mu + shift).clamp_max(0.0)
    ratio = ratio_direction(log_mu, log_pi)
    assert torch.equal(ratio.sign(), (log_pi - log_mu).sign())
    step_left = log_pi < 0
    for direction in (binary_kl_direction(log_mu, log_pi), binary_tv_direction(log_mu, log_pi)):
        agree = direction.sign() == ratio.sign()
        underflows = torch.expm1(log_pi).square() < torch.finfo(dtype).tiny
        assert (agree | ~step_left | underflows).all()
    assert (binary_kl(log_mu, log_mu) == 0).all()
    assert (binary_tv(log_mu, log_mu) == 0).all()
    torch.testing.assert_close(binary_tv(log_mu, log_pi), binary_tv(log_pi, log_mu))


@few
@given(pairs=PAIRS, dtype=DTYPES)
def test_directions_are_bounded_and_vanish_at_equality(pairs: Pairs, dtype: torch.dtype) -> None:
    support, stats = statistics(pairs, dtype)
    same = policy_statistics(pairs.behavior.to(dtype), support)
    for tail in ("aggregated", "uniform", "exact"):
        for direction in (kl_direction, tv_direction):
            value = direction(support, stats, tail)
            assert value.dtype == dtype
            # |pi_k - mu_k| <= 1 and two sums of products of probabilities.
            assert (value.abs() <= 2.0).all()
        at_equality = kl_direction(support, same, tail)
        assert (at_equality.abs() <= 100 * torch.finfo(dtype).eps).all()
    for full in (kl_direction_full, tv_direction_full):
        assert (full(pairs.log_mu, pairs.log_pi, pairs.sampled).abs() <= 2.0).all()
        assert (full(pairs.log_mu, pairs.log_mu, pairs.sampled) == 0).all()


@few
@given(pairs=PAIRS, dtype=DTYPES)
def test_the_certified_interval_holds_what_it_says(pairs: Pairs, dtype: torch.dtype) -> None:
    support, stats = statistics(pairs, dtype)
    lower, upper = kl_direction_bounds(support, stats)
    truth = kl_direction_full(pairs.log_mu, pairs.log_pi, pairs.sampled)
    result = certified_kl_direction(support, stats)
    assert ((lower <= truth) & (truth <= upper)).all()
    assert ((lower <= result.direction) & (result.direction <= upper)).all()
    assert (result.direction[result.certified].sign() == truth[result.certified].sign()).all()


@few
@given(seed=SEEDS, count=st.integers(0, 50), threshold=st.floats(1e-3, 2.0))
def test_masks_veto_only_what_is_outside_and_outward(
    seed: int, count: int, threshold: float
) -> None:
    advantages, direction, log_mu, log_pi = numbers(seed, 4 * count).view(4, count)
    log_mu, log_pi = -log_mu.abs(), -log_pi.abs()
    clip = {"low": min(threshold, 0.9), "high": threshold}
    for mask in (
        divergence_mask(advantages, direction.square(), direction, threshold),
        ratio_clip_mask(advantages, log_mu, log_pi, **clip),
    ):
        assert torch.equal(mask.keep, ~(mask.outside & mask.outward))
        counts = mask_counts(mask)
        assert counts.tokens == count
        assert counts.vetoed <= torch.minimum(counts.outside, counts.outward)
        nowhere = torch.zeros(count, dtype=torch.bool)
        assert mask_counts(mask, trained=nowhere).vetoed == 0
    # Of two opposite updates at most one is outward.
    mirrored = divergence_mask(-advantages, direction.square(), direction, threshold)
    plain = divergence_mask(advantages, direction.square(), direction, threshold)
    assert not (mirrored.outward & plain.outward).any()


@few
@given(
    seed=SEEDS,
    groups=st.integers(1, 6),
    rewards=st.lists(st.floats(-10.0, 10.0) | st.just(float("nan")), max_size=30),
    normalize=st.sampled_from(["std", "none"]),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
)
def test_advantages_of_a_group_sum_to_zero(
    seed: int, groups: int, rewards: list[float], normalize: str, baseline: str
) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(groups, (len(rewards),), generator=generator)
    result = group_advantages(values, ids, normalize=normalize, baseline=baseline)
    assert result.isfinite().all()
    assert (result[values.isnan()] == 0).all()
    for group in range(groups):
        assert abs(result[ids == group].sum().item()) < 1e-5
    order = torch.randperm(len(rewards), generator=generator)
    shuffled = group_advantages(values[order], ids[order], normalize=normalize, baseline=baseline)
    assert torch.equal(shuffled, result[order])


@few
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "sequence_sum_fixed"]),
    cut=st.integers(0, 80),
)
def test_weights_make_one_mean_of_any_split(lengths: list[int], aggregation: str, cut: int) -> None:
    sizes = torch.tensor(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    tokens, sequences = int(sizes.sum()), int((sizes > 0).sum())
    fixed = 7 if aggregation == "sequence_sum_fixed" else None

    def weights(part: Tensor) -> Tensor:
        return token_weights(
            part,
            sizes,
            aggregation=aggregation,
            global_tokens=tokens,
            global_sequences=sequences,
            fixed_length=fixed,
            dtype=torch.float64,
        )

    whole = weights(ids)
    assert torch.equal(torch.cat([weights(ids[:cut]), weights(ids[cut:])]), whole)
    # A loss of 1 everywhere has mean 1, or as a sum of fixed length the mean length / 7.
    mean = whole.sum().item() / max(tokens, 1)
    expected = 0.0 if not tokens else tokens / (sequences * 7) if fixed else 1.0
    assert mean == pytest.approx(expected)


@few
@given(policy=LOG_PROBS, shift=st.floats(-4.0, 4.0), estimator=st.sampled_from(["k2", "k3"]))
def test_penalties_are_not_negative_and_pull_towards_the_reference(
    policy: list[float], shift: float, estimator: str
) -> None:
    log_pi = torch.tensor(policy, dtype=torch.float64)
    log_ref = (log_pi + shift).clamp_max(0.0)
    assert (reference_kl(log_pi, log_ref, estimator) >= 0).all()
    slope = reference_kl_slope(log_pi, log_ref, estimator)
    assert torch.equal(slope.sign(), (log_pi - log_ref).sign())
    assert (reference_kl(log_pi, log_pi, estimator) == 0).all()


@few
@given(pairs=PAIRS, dtype=DTYPES, temperature=st.floats(0.3, 3.0), cut=st.integers(0, 40))
def test_statistics_are_those_of_a_distribution(
    pairs: Pairs, dtype: torch.dtype, temperature: float, cut: int
) -> None:
    support = pairs.support(dtype)
    stats = policy_statistics(pairs.policy.to(dtype), support, temperature=temperature)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    mass = stats.support_log_probs.exp().sum(dim=-1) + stats.tail_prob
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=tolerance, atol=tolerance)
    assert (stats.tail_sum_square <= stats.tail_max * stats.tail_prob * (1 + tolerance)).all()
    assert (stats.tail_sum_square <= stats.sum_square * (1 + tolerance)).all()
    assert (stats.entropy >= 0).all()
    # Padding changes nothing.
    padded = torch.cat([pairs.policy, numbers(cut, len(pairs.sampled) * 3).view(-1, 3)], dim=-1)
    vocab = pairs.policy.shape[-1]
    shard = VocabShard(0, vocab + 3, vocab)
    same = policy_statistics(padded.to(dtype), support, temperature=temperature, shard=shard)
    torch.testing.assert_close(same.log_prob, stats.log_prob, rtol=tolerance, atol=tolerance)


CONFIGS = st.sampled_from(
    [
        PolicyLossConfig(mask="none"),
        PolicyLossConfig(mask="ratio_clip", dual_clip=3.0),
        PolicyLossConfig(direction="certified", threshold=0.05, ratio_cap=2.0),
        PolicyLossConfig(divergence="topk_tv", direction="exact", threshold=0.05),
        PolicyLossConfig(divergence="binary_tv", direction="aggregated", non_finite="drop"),
        PolicyLossConfig(kl_coefficient=0.1, non_finite="drop"),
    ]
)


@few
@given(pairs=PAIRS, config=CONFIGS, seed=SEEDS, poison=st.sampled_from([0.0, float("nan")]))
def test_loss_is_a_sum_over_tokens_whose_gradient_is_the_coefficient(
    pairs: Pairs, config: PolicyLossConfig, seed: int, poison: float
) -> None:
    support, stats = statistics(pairs, torch.float64)
    count = len(pairs.sampled)
    log_prob = stats.log_prob.clone().requires_grad_()
    stats = pdm.PolicyStatistics(**{**vars(stats), "log_prob": log_prob})
    trained = numbers(seed, count) > -0.5
    advantages = torch.where(trained, numbers(seed + 1, count), poison)
    reference = torch.where(trained, stats.log_prob.detach() + 0.1, poison)
    result = policy_loss(
        stats,
        support,
        advantages,
        config,
        trained=trained,
        reference_log_prob=reference,
        check_finite=False,
    )
    result.loss.backward()
    assert torch.equal(log_prob.grad, result.coefficient)
    assert (result.coefficient[~trained] == 0).all()
    assert result.num_tokens == trained.sum()
    assert not (result.non_finite & ~trained).any()
    if config.kl_coefficient == 0:
        assert (result.coefficient[~result.mask.keep] == 0).all()
    if config.non_finite == "drop":
        assert result.coefficient.isfinite().all()
    elif result.non_finite.any():
        with pytest.raises(FloatingPointError):
            raise_on_non_finite(result)
    else:
        raise_on_non_finite(result)
        assert result.loss.isfinite()


@few
@given(seed=SEEDS, count=st.integers(0, 30))
def test_a_mask_that_keeps_all_counts_nothing(seed: int, count: int) -> None:
    counts = mask_counts(MaskResult.keep_all(numbers(seed, count)))
    assert (counts.tokens, counts.outside, counts.vetoed) == (count, 0, 0)
