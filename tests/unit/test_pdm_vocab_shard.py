# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pdm import VocabShard


def test_for_rank_splits_the_padded_vocabulary() -> None:
    group = object()  # only carried
    shards = [VocabShard.for_rank(10, 16, rank, 4, group) for rank in range(4)]
    assert [(s.start, s.stop) for s in shards] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert [s.width for s in shards] == [4, 4, 4, 4]
    assert [s.true_width for s in shards] == [4, 4, 2, 0]


def test_every_token_has_one_owner_and_padding_has_none() -> None:
    group = object()
    ids = torch.arange(-2, 20)
    shards = [VocabShard.for_rank(10, 16, rank, 4, group) for rank in range(4)]
    owners = torch.stack([s.owns(ids) for s in shards]).sum(dim=0)
    assert owners.tolist() == [0, 0] + [1] * 10 + [0] * 10
    assert torch.equal(shards[3].in_vocabulary(ids), owners.bool())


def test_reductions_without_a_group_copy() -> None:
    values = torch.tensor([1.0, 2.0])
    shard = VocabShard(0, 4, 4)
    for reduced in (shard.all_reduce_max(values), shard.all_reduce_sum(values)):
        assert torch.equal(reduced, values)
        assert reduced.data_ptr() != values.data_ptr()
    with pytest.raises(ValueError, match="carry no gradient"):
        shard.all_reduce_sum(values.requires_grad_())


def test_errors_say_what_arrived() -> None:
    with pytest.raises(ValueError, match="padded_vocab_size=18 is not a multiple of world_size=4"):
        VocabShard.for_rank(10, 18, 0, 4, None)
    with pytest.raises(ValueError, match="padded_vocab_size=8 is below vocab_size=10"):
        VocabShard.for_rank(10, 8, 0, 4, None)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\), got 4"):
        VocabShard.for_rank(10, 16, 4, 4, None)
    with pytest.raises(ValueError, match="without a group"):
        VocabShard(4, 8, 16)
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        VocabShard(5, 4, 16)
    with pytest.raises(ValueError, match="vocab_size must be at least 1"):
        VocabShard(0, 0, 0)
