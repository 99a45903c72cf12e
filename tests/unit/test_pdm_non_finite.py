# SPDX-License-Identifier: Apache-2.0
"""A token that is not finite and enters the loss raises, or is dropped and counted."""

import math

import pytest
import torch

from pdm import (
    BehaviorSupport,
    PolicyLossConfig,
    policy_loss,
    policy_statistics,
    raise_on_non_finite,
)
from tests.unit.pdm_cases import random_case, sampled_only

NAN, INF = math.nan, math.inf

BAD = [
    ("policy", [-1.0, -1.0, -1.0], [-1.0, NAN, -1.0]),
    ("behavior", [-1.0, NAN, -1.0], [-1.0, -1.0, -1.0]),
    ("impossible for mu", [-1.0, -INF, -1.0], [-1.0, -1.0, -1.0]),
    ("impossible for pi", [-1.0, -1.0, -1.0], [-1.0, -INF, -1.0]),
    ("overflow", [-1.0, -150.0, -1.0], [-1.0, -1.0, -1.0]),
]


@pytest.mark.parametrize(("what", "behavior", "policy"), BAD)
def test_a_kept_token_that_is_not_finite_raises_with_its_position(
    what: str, behavior: list[float], policy: list[float]
) -> None:
    _, stats, support = sampled_only(behavior, policy)
    config = PolicyLossConfig(mask="none")
    with pytest.raises(FloatingPointError, match=r"1 of 3 tokens .* token 1: log_ratio="):
        policy_loss(stats, support, torch.ones(3), config)
    later = policy_loss(stats, support, torch.ones(3), config, check_finite=False)
    assert not later.loss.isfinite()
    assert later.non_finite.tolist() == [False, True, False]
    with pytest.raises(FloatingPointError, match="token 1"):
        raise_on_non_finite(later)


@pytest.mark.parametrize(("what", "behavior", "policy"), BAD)
def test_or_is_dropped_and_counted(what: str, behavior: list[float], policy: list[float]) -> None:
    log_prob, stats, support = sampled_only(behavior, policy)
    config = PolicyLossConfig(mask="none", non_finite="drop")
    result = policy_loss(stats, support, torch.ones(3), config)
    result.loss.backward()
    assert result.loss.item() == -2.0
    assert log_prob.grad.tolist() == [-1.0, 0.0, -1.0]
    assert result.non_finite.tolist() == [False, True, False]
    assert result.num_tokens.item() == 3
    assert result.ratio.tolist() == [1.0] * 3
    for name in ("log_ratio", "divergence", "direction"):
        assert getattr(result, name).isfinite().all(), name


def test_advantages_and_weights_that_are_not_finite_raise_too() -> None:
    _, stats, support = sampled_only([-1.0, -1.0], [-1.0, -1.0])
    bad, good = torch.tensor([1.0, NAN]), torch.ones(2)
    for advantages, weights in ((bad, good), (good, bad), (INF * good, good)):
        with pytest.raises(FloatingPointError, match="not finite"):
            policy_loss(stats, support, advantages, PolicyLossConfig(), weights=weights)


def test_a_token_kept_because_the_mask_compared_nan_raises() -> None:
    # The sampled token is sound, so the gradient is finite; but no mask has looked at it.
    case = random_case(seed=63)
    log_probs = case.support.log_probs.clone()
    column = int((case.support.sampled_column[2] + 1) % 5)
    log_probs[2, column] = NAN
    support = BehaviorSupport(case.support.token_ids, log_probs, case.support.sampled)
    stats = policy_statistics(case.logits, support)
    with pytest.raises(FloatingPointError, match="token 2"):
        policy_loss(stats, support, torch.ones(7), PolicyLossConfig())
    result = policy_loss(stats, support, torch.ones(7), PolicyLossConfig(mask="ratio_clip"))
    assert result.loss.isfinite()


def test_positions_of_padded_batches_and_of_many_tokens() -> None:
    flat = random_case(seed=64, tokens=12)
    logits = flat.logits.clone()
    logits[7] = NAN
    support = BehaviorSupport(
        flat.support.token_ids.view(3, 4, -1),
        flat.support.log_probs.view(3, 4, -1),
        flat.sampled.view(3, 4),
    )
    stats = policy_statistics(logits.view(3, 4, -1), support)
    with pytest.raises(FloatingPointError, match=r"token \(1, 3\)"):
        policy_loss(stats, support, torch.ones(3, 4), PolicyLossConfig())
    _, stats, support = sampled_only([NAN] * 9, [-1.0] * 9)
    with pytest.raises(FloatingPointError, match=r"9 of 9 tokens .* and 4 more"):
        policy_loss(stats, support, torch.ones(9), PolicyLossConfig())


def test_garbage_reaches_penalty_and_bonus_wherever_they_act() -> None:
    # Vetoed, so the policy term is silent; the penalty is not.
    _, stats, support = sampled_only([-2.0, -1.0], [-1.0, -1.0], entropy=[1.0, NAN])
    config = PolicyLossConfig(mask="ratio_clip", kl_coefficient=0.1)
    reference = torch.tensor([NAN, -1.0])
    with pytest.raises(FloatingPointError, match="token 0"):
        policy_loss(stats, support, torch.ones(2), config, reference_log_prob=reference)
    config = PolicyLossConfig(
        mask="ratio_clip", kl_coefficient=0.1, entropy_coefficient=0.1, non_finite="drop"
    )
    result = policy_loss(stats, support, torch.ones(2), config, reference_log_prob=reference)
    assert result.non_finite.tolist() == [True, True]
    assert result.loss.item() == 0.0
    result.loss.backward()
    assert (stats.entropy.grad == 0).all()
