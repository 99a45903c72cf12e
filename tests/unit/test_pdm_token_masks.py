# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from pdm import MaskResult, divergence_mask, mask_counts, ratio_clip_mask


def test_divergence_mask_truth_table() -> None:
    #                        in, in, out, out, out, out, A=0, D'=0, at the threshold
    divergence = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.15])
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 1.0, 1.0])
    direction = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 0.0, 1.0])
    threshold = torch.tensor(0.15).item()  # what 0.15 is in float32
    mask = divergence_mask(advantages, divergence, direction, threshold)
    assert mask.outside.tolist() == [False, False, True, True, True, True, True, True, False]
    assert mask.outward.tolist() == [True, False, True, False, False, True, False, False, True]
    assert mask.keep.tolist() == [True, True, False, True, True, False, True, True, True]
    assert torch.equal(mask.keep, ~(mask.outside & mask.outward))


@pytest.mark.parametrize(("advantage", "direction"), [(1e-30, 1e-30), (-1e-30, -1e-30)])
def test_signs_do_not_underflow(advantage: float, direction: float) -> None:
    # The float32 product is 0, which would keep a token that must be vetoed.
    mask = divergence_mask(
        torch.tensor([advantage]), torch.tensor([1.0]), torch.tensor([direction]), 0.15
    )
    assert mask.keep.tolist() == [False]
    mask = divergence_mask(
        torch.tensor([-advantage]), torch.tensor([1.0]), torch.tensor([direction]), 0.15
    )
    assert mask.keep.tolist() == [True]


def test_ratio_clip_is_two_sided_and_asymmetric() -> None:
    ratio = torch.tensor([0.79, 0.81, 1.0, 1.27, 1.29])
    behavior = torch.full((5,), -2.0)
    policy = behavior + ratio.log()
    up = ratio_clip_mask(torch.ones(5), behavior, policy, low=0.2, high=0.28)
    assert up.outside.tolist() == [True, False, False, False, True]
    assert up.outward.tolist() == [False, False, False, True, True]
    assert up.keep.tolist() == [True, True, True, True, False]
    down = ratio_clip_mask(-torch.ones(5), behavior, policy, low=0.2, high=0.28)
    assert down.outside.tolist() == up.outside.tolist()
    assert down.outward.tolist() == [True, True, False, False, False]
    assert down.keep.tolist() == [False, True, True, True, True]


def test_ratio_clip_is_the_gradient_of_the_ppo_surrogate() -> None:
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(500, generator=generator, dtype=torch.float64)
    behavior = -torch.rand(500, generator=generator, dtype=torch.float64) * 3
    policy = (behavior + 0.4 * torch.randn(500, generator=generator, dtype=torch.float64)).clamp(
        max=0
    )
    policy.requires_grad_()
    ratio = torch.exp(policy - behavior)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages)
    surrogate.sum().backward()
    mask = ratio_clip_mask(advantages, behavior, policy, low=0.2, high=0.28)
    assert policy.grad is not None
    assert 0.1 < (~mask.keep).double().mean() < 0.9
    torch.testing.assert_close(policy.grad, mask.keep * (ratio * advantages).detach())


def test_extreme_ratio_is_outside() -> None:
    mask = ratio_clip_mask(
        torch.tensor([1.0, -1.0]),
        torch.tensor([-200.0, -1.0]),
        torch.tensor([-1.0, -200.0]),
        low=0.2,
        high=0.28,
    )
    assert mask.keep.tolist() == [False, False]


def test_nan_is_kept_and_so_stays_visible() -> None:
    nan = torch.tensor([math.nan])
    one = torch.tensor([1.0])
    assert divergence_mask(one, nan, one, 0.15).keep.all()
    assert divergence_mask(one, one, nan, 0.15).keep.all()
    assert ratio_clip_mask(one, nan, -one, low=0.2, high=0.28).keep.all()


def test_masks_carry_no_gradient() -> None:
    policy = torch.tensor([-0.5], requires_grad=True)
    mask = ratio_clip_mask(torch.ones(1), torch.tensor([-2.0]), policy, low=0.2, high=0.28)
    assert not mask.keep.requires_grad
    assert mask.keep.dtype == mask.outside.dtype == mask.outward.dtype == torch.bool


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.inf, math.nan])
def test_a_threshold_without_meaning_is_refused(threshold: float) -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="threshold must be finite and above 0"):
        divergence_mask(one, one, one, threshold)


def test_clip_bounds_without_meaning_are_refused() -> None:
    one = torch.ones(1)
    for low in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"low must be in \(0, 1\)"):
            ratio_clip_mask(one, -one, -one, low=low, high=0.28)
    for high in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="high must be finite and above 0"):
            ratio_clip_mask(one, -one, -one, low=0.2, high=high)


def test_counts_by_reason_are_over_trained_tokens() -> None:
    #                     vetoed, outside, outward, inside, not trained
    outside = torch.tensor([True, True, False, False, True])
    outward = torch.tensor([True, False, True, False, True])
    mask = MaskResult.from_criteria(outside, outward)
    trained = torch.tensor([True, True, True, True, False])
    certified = torch.tensor([True, False, True, False, True])
    counts = mask_counts(mask, trained=trained, certified=certified)
    assert {name: value.item() for name, value in vars(counts).items()} == {
        "tokens": 4,
        "outside": 2,
        "outward": 2,
        "vetoed": 1,
        "certified": 2,
        "certified_outside": 1,
    }
    everything = mask_counts(mask)
    assert (everything.tokens.item(), everything.vetoed.item()) == (5, 2)
    assert everything.certified is None
    assert everything.certified_outside is None
    assert everything.tokens.dtype == torch.int64
    nothing = mask_counts(MaskResult.keep_all(torch.zeros(0)))
    assert nothing.tokens.item() == nothing.vetoed.item() == 0
