# SPDX-License-Identifier: Apache-2.0
"""The two-stage top-K against torch's own, and its rule for ties against a stable sort."""

import pytest
import torch

from megatron.rl.rollout.worker.fast_topk import BLOCK, block_topk

WIDTHS = [20, 151, 20 * BLOCK, 20 * BLOCK + 1, 21 * BLOCK, 30 * BLOCK + 17, 9973]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("k", [0, 1, 20])
def test_it_is_torch_topk_where_nothing_is_equal(width, k):
    order = torch.stack([torch.randperm(width) for _ in range(5)])
    values = -order.float() / width
    top, positions = block_topk(values, k)
    expected = torch.topk(values, k, dim=1)
    assert torch.equal(top, expected.values)
    assert torch.equal(positions, expected.indices)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("levels", [1, 3, 40])
def test_of_equal_values_the_lower_position_comes_first(width, levels):
    generator = torch.Generator().manual_seed(width + levels)
    values = -torch.randint(levels, (20, width), generator=generator).float()
    values[0, ::2] = -torch.inf  # as after a top-p cut
    values[1] = torch.where(torch.arange(width) % 3 == 0, 0.0, -0.0)
    top, positions = block_topk(values, 20)
    expected = torch.sort(values, dim=1, descending=True, stable=True)
    assert torch.equal(top, expected.values[:, :20])
    assert torch.equal(positions, expected.indices[:, :20])


def test_rounded_log_probs_of_a_large_vocabulary():
    """As a bfloat16 model gives them: hundreds of equal values, some at the K-th place."""
    generator = torch.Generator().manual_seed(0)
    logits = (6 * torch.randn(8, 151_936, generator=generator)).bfloat16().float()
    values = logits.log_softmax(-1)
    top, positions = block_topk(values, 20)
    expected = torch.sort(values, dim=1, descending=True, stable=True)
    assert (expected.values[:, 19] == expected.values[:, 20]).any(), "no tie at the K-th place"
    assert torch.equal(top, expected.values[:, :20])
    assert torch.equal(positions, expected.indices[:, :20])


def test_a_row_of_nan_stays_one():
    values = torch.zeros(2, 3000).log_softmax(-1)
    values[1] = torch.nan
    top, _ = block_topk(values, 5)
    assert top[1].isnan().all() and not top[0].isnan().any()
