# SPDX-License-Identifier: Apache-2.0
import math
import statistics

import pytest
import torch

from pdm import group_advantages

NAN, INF = math.nan, math.inf


def test_hand_worked_groups() -> None:
    # Group 7: 0, 0, 1, 3 has mean 1 and sample deviation sqrt(2). Group 2: 1, 0 has sqrt(1/2).
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 3.0, 0.0])
    ids = torch.tensor([7, 2, 7, 7, 7, 2])
    advantages = group_advantages(rewards, ids, eps=0.0)
    root = math.sqrt(2.0)
    expected = [-1 / root, root / 2, -1 / root, 0.0, 2 / root, -root / 2]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-7)
    plain = group_advantages(rewards, ids, normalize="none")
    assert plain.tolist() == pytest.approx([-1.0, 0.5, -1.0, 0.0, 2.0, -0.5])


def test_against_the_standard_library_in_any_row_order() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(60, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 9, (60,), generator=generator) * 1000 - 3
    advantages = group_advantages(rewards, ids)
    for prompt in ids.unique().tolist():
        values = rewards[ids == prompt].tolist()
        expected = [
            (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)
            for value in values
        ]
        assert advantages[ids == prompt].tolist() == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(60, generator=generator)
    torch.testing.assert_close(
        group_advantages(rewards[order], ids[order]), advantages[order], rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("normalize", ["std", "none"])
def test_group_of_one_and_constant_groups_get_exactly_zero(normalize: str) -> None:
    # The mean of three times 0.1 is not 0.1; eps = 0 would divide one rounding error by another.
    rewards = torch.tensor([5.0, 0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    ids = torch.tensor([0, 1, 1, 1, 2, 2, 2, 2])
    advantages = group_advantages(rewards, ids, normalize=normalize, eps=0.0)
    assert (advantages == 0).all()


def test_deviation_is_the_groups_not_the_batchs() -> None:
    alone = group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))
    ids = torch.tensor([0, 0, 1, 1])
    together = group_advantages(torch.tensor([0.0, 1.0, 0.0, 100.0]), ids)
    assert torch.equal(alone, together[:2])


def test_non_finite_rewards_get_zero_and_poison_nobody() -> None:
    rewards = torch.tensor([1.0, NAN, NAN, 0.0, 1.0, INF, -INF, NAN])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    advantages = group_advantages(rewards, ids, eps=0.0)
    root = math.sqrt(0.5)
    expected = [0.0, 0.0, 0.0, -root, root, 0.0, 0.0, 0.0]
    assert advantages.tolist() == pytest.approx(expected)


def test_dtypes_and_emptiness() -> None:
    ids = torch.tensor([0, 0], dtype=torch.int32)
    assert group_advantages(torch.tensor([0, 1]), ids).dtype == torch.float32
    assert group_advantages(torch.tensor([False, True]), ids).tolist() == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5
    )
    assert group_advantages(torch.zeros(2, dtype=torch.bfloat16), ids).dtype == torch.float32
    assert group_advantages(torch.zeros(0), ids[:0]).shape == (0,)
    rewards = torch.tensor([0.0, NAN], requires_grad=True)
    assert not group_advantages(rewards, ids).requires_grad


def test_errors_say_what_arrived() -> None:
    rewards, ids = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must both be \[B\], got \(3,\) and \(2,\)"):
        group_advantages(rewards, ids[:2])
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        group_advantages(rewards.view(1, 3), ids.view(1, 3))
    with pytest.raises(ValueError, match=r"prompt_ids must be integers, got torch.float32"):
        group_advantages(rewards, rewards)
    with pytest.raises(ValueError, match=r"normalize must be one of .* got 'batch'"):
        group_advantages(rewards, ids, normalize="batch")
    with pytest.raises(ValueError, match="eps must be finite"):
        group_advantages(rewards, ids, eps=-1.0)


def test_leave_one_out_by_hand() -> None:
    # Group 7: 0, 0, 1, 3; each against the mean of the other three. Group 2: 1 against 0.
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    ids = torch.tensor([7, 2, 7, 7, 7, 2])
    result = group_advantages(rewards, ids, normalize="none", baseline="leave_one_out")
    assert result.tolist() == pytest.approx([-4 / 3, 1.0, -4 / 3, 0.0, 8 / 3, -1.0])
    scaled = group_advantages(rewards, ids, baseline="leave_one_out", eps=0.0)
    root = math.sqrt(2.0)
    assert scaled[:2].tolist() == pytest.approx([-4 / 3 / root, root])


def test_leave_one_out_ignores_what_is_not_finite_and_groups_without_contrast() -> None:
    rewards = torch.tensor([5.0, 0.1, 0.1, 0.1, 1.0, NAN, 3.0, INF, 2.0], dtype=torch.float64)
    ids = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3])
    result = group_advantages(rewards, ids, normalize="none", baseline="leave_one_out")
    assert result.tolist() == [0.0, 0.0, 0.0, 0.0, -2.0, 0.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_the_order_of_the_rows_changes_no_bit(normalize: str, baseline: str) -> None:
    # Rewards of many magnitudes: a sum in another order is another float64.
    generator = torch.Generator().manual_seed(4)
    rewards = torch.randn(500, generator=generator, dtype=torch.float64)
    rewards = rewards * 10.0 ** torch.randint(-8, 9, (500,), generator=generator)
    ids = torch.randint(0, 7, (500,), generator=generator)
    plain = group_advantages(rewards, ids, normalize=normalize, baseline=baseline)
    for _ in range(5):
        order = torch.randperm(500, generator=generator)
        shuffled = group_advantages(
            rewards[order], ids[order], normalize=normalize, baseline=baseline
        )
        assert torch.equal(shuffled, plain[order])


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"baseline must be one of .* got 'max'"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), baseline="max")
