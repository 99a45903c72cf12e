# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch

from pdm import (
    BehaviorSupport,
    MaskResult,
    PolicyLossConfig,
    PolicyStatistics,
    policy_loss,
    policy_statistics,
)
from tests.unit.pdm_cases import Case, random_case, sampled_only, textbook_topk_kl

NAN, INF = math.nan, math.inf


def keep_positive(
    stats: PolicyStatistics, support: BehaviorSupport, advantages: torch.Tensor
) -> MaskResult:
    """A custom mask: veto every negative advantage."""
    assert not stats.log_prob.requires_grad
    negative = advantages < 0
    return MaskResult.from_criteria(negative, negative)


def wrong_return(
    stats: PolicyStatistics, support: BehaviorSupport, advantages: torch.Tensor
) -> torch.Tensor:
    return advantages > 0


def wrong_dtype(
    stats: PolicyStatistics, support: BehaviorSupport, advantages: torch.Tensor
) -> MaskResult:
    return MaskResult(advantages, advantages > 0, advantages > 0)


NOT_CALLABLE = 3


def plain_mask(case: Case, advantages: torch.Tensor, config: PolicyLossConfig) -> torch.Tensor:
    """Eq. 13 from the textbook formulas, token by token in Python."""
    keep = []
    for t, k in enumerate(case.sampled.tolist()):
        mu, pi = case.log_mu[t].exp(), case.log_pi[t].exp()
        kept = case.kept_ids(t)
        tail = [j for j in range(len(mu)) if j not in kept]
        divergence = textbook_topk_kl(case.log_mu[t], case.log_pi[t], kept).item()
        if config.direction == "ratio":
            direction = (pi[k] - mu[k]).item()
        else:
            term = pi[tail].sum() * (mu[tail].sum() - pi[tail].sum())
            if config.direction == "uniform":
                term = term / len(tail)
            if config.direction == "exact":
                term = (mu[tail].sum() / pi[tail].sum() - 1) * (pi[tail] ** 2).sum()
            direction = (pi[k] - mu[k] + (pi[kept] * (mu[kept] - pi[kept])).sum() + term).item()
        outward = advantages[t].item() * direction > 0
        keep.append(not (divergence > config.threshold and outward))
    return torch.tensor(keep)


@pytest.mark.parametrize("direction", ["ratio", "aggregated", "uniform", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradient_is_mask_ratio_advantage_times_score(direction: str, dtype: torch.dtype) -> None:
    case = random_case(seed=21, tokens=80, k=4)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(80, generator=generator, dtype=torch.float64)
    weights = torch.rand(80, generator=generator, dtype=torch.float64)
    trained = torch.rand(80, generator=generator) < 0.8
    config = PolicyLossConfig(direction=direction)
    single = Case(case.logits.to(dtype), case.log_mu.to(dtype), case.sampled, case.k)

    logits = single.logits.clone().requires_grad_()
    stats = policy_statistics(logits, single.support, temperature=0.9)
    result = policy_loss(
        stats, single.support, advantages, config, weights=weights, trained=trained
    )
    result.loss.backward()

    tempered = replace(case, logits=case.logits / 0.9)
    keep = plain_mask(tempered, advantages, config)
    assert 8 < (~keep & trained).sum() < 60  # both outcomes are well represented
    plain = case.logits.clone().requires_grad_()
    log_pi = torch.log_softmax(plain / 0.9, dim=-1).gather(-1, case.sampled[:, None]).squeeze(-1)
    log_mu = case.log_mu.gather(-1, case.sampled[:, None]).squeeze(-1)
    factor = weights * keep * trained * torch.exp(log_pi - log_mu).detach() * advantages
    (-factor * log_pi).sum().backward()

    tolerance = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    )
    assert torch.equal(result.mask.keep[trained], keep[trained])
    torch.testing.assert_close(logits.grad.double(), plain.grad, **tolerance)
    torch.testing.assert_close(result.loss.detach().double(), -factor.sum(), **tolerance)
    assert result.loss.dtype == dtype
    assert result.num_tokens.item() == int(trained.sum())
    assert result.num_tokens.dtype == torch.int64


def test_loss_only_counts_kept_and_trained_tokens_by_hand() -> None:
    # r = 2, 2, 2, 1/2; the first is vetoed (outside, outward), the third is a prompt token.
    half, quarter = math.log(0.5), math.log(0.25)
    log_prob, stats, support = sampled_only(
        [quarter, quarter, quarter, half], [half, half, half, quarter]
    )
    advantages = torch.tensor([1.0, -1.0, -7.0, 3.0])
    config = PolicyLossConfig(mask="ratio_clip")
    trained = torch.tensor([True, True, False, True])
    result = policy_loss(stats, support, advantages, config, trained=trained)
    assert result.mask.keep.tolist() == [False, True, True, True]
    assert result.mask.outside.tolist() == [True, True, False, True]
    assert result.mask.outward.tolist() == [True, False, False, False]
    assert result.loss.item() == pytest.approx(2 * 1 - 0.5 * 3)
    assert result.num_tokens.item() == 3
    assert result.ratio.tolist() == pytest.approx([2.0, 2.0, 1.0, 0.5])
    assert result.log_ratio.tolist() == pytest.approx([-half, -half, 0.0, half])
    result.loss.backward()
    assert log_prob.grad.tolist() == pytest.approx([0.0, 2.0, 0.0, -1.5])


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_tokens_that_are_not_trained_add_exactly_nothing(junk: float) -> None:
    log_prob, stats, support = sampled_only([-1.0, junk, -1.0, -1.0], [-1.0, -1.0, junk, -1.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, junk])
    trained = torch.tensor([True, False, False, False])
    weights = torch.tensor([1.0, 1.0, 1.0, junk])
    config = PolicyLossConfig(divergence="topk_kl", ratio_cap=5.0)
    result = policy_loss(stats, support, advantages, config, weights=weights, trained=trained)
    assert result.loss.item() == -1.0
    result.loss.backward()
    assert log_prob.grad.tolist() == [-1.0, 0.0, 0.0, 0.0]
    for name in ("divergence", "direction", "log_ratio"):
        assert getattr(result, name)[1:].tolist() == [0.0] * 3
    assert result.ratio.tolist() == [1.0] * 4
    assert result.num_tokens.item() == 1


def test_vetoed_token_with_an_overflowing_ratio_adds_exactly_nothing() -> None:
    # exp(199) is inf in float32: multiplied by a mask of 0 it is NaN, in the loss and backwards.
    log_prob, stats, support = sampled_only([-200.0, -1.0], [-1.0, -1.0])
    advantages = torch.tensor([1.0, 2.0])
    for mask in ("divergence", "ratio_clip"):
        log_prob.grad = None
        config = PolicyLossConfig(mask=mask, direction="ratio", divergence="binary_kl")
        result = policy_loss(stats, support, advantages, config)
        assert result.mask.keep.tolist() == [False, True]
        assert result.loss.item() == -2.0
        result.loss.backward()
        assert log_prob.grad.tolist() == [0.0, -2.0]


@pytest.mark.parametrize("what", ["advantage", "weight"])
def test_zero_advantage_or_weight_adds_exactly_nothing(what: str) -> None:
    log_prob, stats, support = sampled_only([-200.0, NAN], [-1.0, -1.0])
    one, zero = torch.ones(2), torch.zeros(2)
    result = policy_loss(
        stats,
        support,
        zero if what == "advantage" else one,
        PolicyLossConfig(mask="none"),
        weights=zero if what == "weight" else one,
    )
    assert result.loss.item() == 0.0
    result.loss.backward()
    assert log_prob.grad.tolist() == [0.0, 0.0]
    assert result.num_tokens.item() == 2


def test_inactive_rows_are_exact_zeros_down_to_the_logits() -> None:
    case = random_case(seed=22)
    logits = case.logits.clone()
    logits[0] = NAN
    logits[1, 3] = INF
    logits.requires_grad_()
    stats = policy_statistics(logits, case.support)
    trained = torch.arange(7) > 1
    config = PolicyLossConfig(mask="none")
    result = policy_loss(stats, case.support, torch.ones(7), config, trained=trained)
    result.loss.backward()
    assert result.loss.isfinite()
    assert (logits.grad[:2] == 0).all()
    assert logits.grad.isfinite().all()
    assert (logits.grad[2:] != 0).any(dim=-1).all()


def test_nothing_kept_still_back_propagates_zeros() -> None:
    case = random_case(seed=23)
    logits = case.logits.clone().requires_grad_()
    stats = policy_statistics(logits, case.support)
    result = policy_loss(
        stats,
        case.support,
        torch.ones(7),
        PolicyLossConfig(),
        trained=torch.zeros(7, dtype=torch.bool),
    )
    assert result.loss.requires_grad
    assert result.loss.item() == 0.0
    assert result.num_tokens.item() == 0
    result.loss.backward()
    assert (logits.grad == 0).all()


def test_ratio_cap_bounds_the_coefficient_and_is_counted() -> None:
    log_prob, stats, support = sampled_only([-150.0, -2.0, -1.0], [-1.0, -1.0, -1.0])
    advantages = torch.tensor([-1.0, 1.0, 1.0])
    config = PolicyLossConfig(mask="none", ratio_cap=2.0)
    result = policy_loss(stats, support, advantages, config)
    result.loss.backward()
    assert log_prob.grad.tolist() == [2.0, -2.0, -1.0]
    assert result.capped.tolist() == [True, True, False]
    assert result.ratio.tolist() == pytest.approx([INF, math.e, 1.0])


def test_a_vetoed_token_is_not_counted_as_capped() -> None:
    _, stats, support = sampled_only([-3.0, -3.0], [-1.0, -1.0])
    config = PolicyLossConfig(mask="ratio_clip", ratio_cap=2.0)
    result = policy_loss(stats, support, torch.tensor([1.0, -1.0]), config)
    assert result.mask.keep.tolist() == [False, True]
    assert result.capped.tolist() == [False, True]


def test_on_policy_all_masks_coincide() -> None:
    case = random_case(seed=24, distance=0.0)
    advantages = torch.linspace(-1, 1, 7, dtype=torch.float64)
    losses = []
    for mask in ("none", "ratio_clip", "divergence"):
        stats = policy_statistics(case.logits, case.support)
        result = policy_loss(stats, case.support, advantages, PolicyLossConfig(mask=mask))
        assert result.mask.keep.all()
        losses.append(result.loss.item())
    assert losses[0] == losses[1] == losses[2] == pytest.approx(-advantages.sum().item())


@pytest.mark.parametrize("mask", ["none", "ratio_clip"])
def test_divergence_and_direction_are_reported_whatever_the_mask(mask: str) -> None:
    case = random_case(seed=25)
    stats = policy_statistics(case.logits.requires_grad_(), case.support)
    advantages = torch.ones(7)
    reported = policy_loss(stats, case.support, advantages, PolicyLossConfig(mask=mask))
    used = policy_loss(stats, case.support, advantages, PolicyLossConfig())
    assert torch.equal(reported.divergence, used.divergence)
    assert torch.equal(reported.direction, used.direction)
    tensors = [value for value in vars(reported).values() if isinstance(value, torch.Tensor)]
    assert [t.requires_grad for t in tensors] == [True] + [False] * (len(tensors) - 1)
    assert reported.certified is None
    assert reported.reference_kl is None


def test_binary_kl_with_either_direction_gives_one_mask() -> None:
    case = random_case(seed=26, tokens=60, distance=2.0)
    stats = policy_statistics(case.logits, case.support)
    advantages = torch.randn(60, generator=torch.Generator().manual_seed(2))
    masks = [
        policy_loss(
            stats,
            case.support,
            advantages,
            PolicyLossConfig(divergence="binary_kl", direction=direction, threshold=0.05),
        ).mask
        for direction in ("ratio", "aggregated")
    ]
    assert 0 < (~masks[0].keep).sum() < 60
    assert torch.equal(masks[0].keep, masks[1].keep)


@pytest.mark.parametrize("separator", [":", "."])
def test_mask_from_an_import_path(separator: str) -> None:
    case = random_case(seed=27)
    stats = policy_statistics(case.logits.requires_grad_(), case.support)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    config = PolicyLossConfig(mask=f"{__name__}{separator}keep_positive")
    result = policy_loss(stats, case.support, advantages, config)
    assert result.mask.keep.tolist() == [True, False, True, False, True, False, True]


def test_a_custom_mask_must_return_what_a_mask_is() -> None:
    case = random_case(seed=28)
    stats = policy_statistics(case.logits, case.support)
    config = PolicyLossConfig(mask=f"{__name__}:wrong_return")
    with pytest.raises(ValueError, match="must return a MaskResult, got Tensor"):
        policy_loss(stats, case.support, torch.ones(7), config)
    config = PolicyLossConfig(mask=f"{__name__}:wrong_dtype")
    with pytest.raises(ValueError, match="keep must be bool"):
        policy_loss(stats, case.support, torch.ones(7), config)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("mask", "clip", "mask must be one of .* got 'clip'"),
        ("mask", ".", "mask must be one of"),
        ("mask", None, "mask must be one of .* got None"),
        ("mask", "no_such_package.module:mask", "cannot import 'no_such_package.module'"),
        ("mask", "math:no_such_function", "expected a function 'no_such_function' in 'math'"),
        ("mask", f"{__name__}:NOT_CALLABLE", "expected a function"),
        ("divergence", "kl", "divergence must be one of .* got 'kl'"),
        ("direction", "certain", "direction must be one of .* got 'certain'"),
        ("aggregation", "mean", "aggregation must be one of .* got 'mean'"),
        ("threshold", 0.0, "threshold must be a finite number above 0.0, got 0.0"),
        ("threshold", INF, "threshold must be a finite number"),
        ("threshold", NAN, "threshold must be a finite number"),
        ("threshold", "0.15", "threshold must be a finite number above 0.0, got '0.15'"),
        ("clip_low", 1.0, "clip_low must be a finite number above 0.0 and below 1.0, got 1.0"),
        ("clip_high", 0.0, "clip_high must be a finite number"),
        ("clip_high", True, "clip_high must be a finite number"),
        ("ratio_cap", 1.0, "ratio_cap must be a finite number above 1.0, got 1.0"),
        ("dual_clip", 1.0, "dual_clip must be a finite number above 1.0, got 1.0"),
        ("kl_coefficient", -0.1, "kl_coefficient must be a finite number above 0.0, got -0.1"),
        ("kl_coefficient", NAN, "kl_coefficient must be a finite number"),
        ("kl_estimator", "k1", "kl_estimator must be one of .* got 'k1'"),
        ("entropy_coefficient", INF, "entropy_coefficient must be a finite number"),
        ("non_finite", "ignore", "non_finite must be one of .* got 'ignore'"),
        ("fixed_length", 16, "fixed_length=16 has no effect with aggregation='token_mean'"),
    ],
)
def test_wrong_settings_are_named(setting: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossConfig(**{setting: value})


@pytest.mark.parametrize("divergence", ["binary_kl", "binary_tv"])
@pytest.mark.parametrize("direction", ["uniform", "exact", "certified"])
def test_binary_divergences_refuse_a_tail_model(divergence: str, direction: str) -> None:
    with pytest.raises(ValueError, match=f"takes direction 'ratio' .* got '{direction}'"):
        PolicyLossConfig(divergence=divergence, direction=direction)


def test_certified_is_for_the_kl_only() -> None:
    PolicyLossConfig(divergence="topk_kl", direction="certified")
    with pytest.raises(ValueError, match="bounds the derivative of the full KL"):
        PolicyLossConfig(divergence="topk_tv", direction="certified")


def test_a_total_variation_of_one_is_never_exceeded() -> None:
    PolicyLossConfig(divergence="topk_kl", threshold=1.5)
    for divergence in ("topk_tv", "binary_tv"):
        with pytest.raises(ValueError, match=r"threshold must be .* below 1.0, got 1.0"):
            PolicyLossConfig(divergence=divergence, direction="ratio", threshold=1.0)


def test_wrong_arguments_are_named() -> None:
    case = random_case(seed=29)
    stats, support = policy_statistics(case.logits, case.support), case.support
    config, ones = PolicyLossConfig(), torch.ones(7)
    with pytest.raises(ValueError, match=r"advantages must be .* \(7,\), .* got \(1,\)"):
        policy_loss(stats, support, torch.ones(1), config)
    with pytest.raises(ValueError, match=r"weights must be .* got \(7, 1\)"):
        policy_loss(stats, support, ones, config, weights=torch.ones(7, 1))
    with pytest.raises(ValueError, match=r"trained must be bool, got torch.float32"):
        policy_loss(stats, support, ones, config, trained=ones)
    with pytest.raises(ValueError, match="the support must be"):
        policy_loss(stats, random_case(seed=29, tokens=3).support, ones, config)
    with pytest.raises(ValueError, match="aggregation='sequence_mean' needs weights"):
        policy_loss(stats, support, ones, PolicyLossConfig(aggregation="sequence_mean"))
    assert policy_loss(
        stats, support, ones, PolicyLossConfig(aggregation="sequence_mean"), weights=ones
    ).loss.isfinite()


def test_no_tokens_and_inputs_unchanged() -> None:
    case = random_case(seed=30)
    stats, support = policy_statistics(case.logits, case.support), case.support
    advantages = torch.tensor([1.0, -2.0, 0.0, 3.0, NAN, 1.0, 1.0])
    trained = torch.tensor([True, False, True, True, False, True, True])
    tensors = (stats.log_prob, advantages, trained, support.log_probs)
    before = [tensor.clone() for tensor in tensors]
    policy_loss(stats, support, advantages, PolicyLossConfig(ratio_cap=1.1), trained=trained)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)

    empty = BehaviorSupport.from_sampled(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    result = policy_loss(
        policy_statistics(torch.zeros(0, 5), empty), empty, torch.zeros(0), PolicyLossConfig()
    )
    assert result.loss.item() == 0.0
    assert result.num_tokens.item() == 0
