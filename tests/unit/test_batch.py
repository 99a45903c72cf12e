# SPDX-License-Identifier: Apache-2.0
"""Packing: which position predicts which token, and who trains on what."""

import numpy as np
import pytest
import torch

from megatron.rl.batch import MinibatchSize, Sequences, minibatches, pack, plan_micro_batches
from megatron.rl.context_parallel import ContextShard, held_positions, order_of_gathered
from megatron.rl.rollout.topk_columns import TopKColumns
from pdm import PolicyLossConfig

TOP_K = 2


def two_sequences() -> Sequences:
    """Prompts [10, 11] and [20], responses [12, 13, 14] and [21]."""
    tokens = np.array([12, 13, 14, 21], dtype=np.int32)
    log_probs = np.log(np.array([0.5, 0.4, 0.3, 0.2], dtype=np.float32))
    return Sequences(
        number=np.array([4, 9]),
        prompt_tokens=np.array([10, 11, 20], dtype=np.int32),
        prompt_offsets=np.array([0, 2, 3]),
        response_tokens=tokens,
        response_offsets=np.array([0, 3, 4]),
        group=np.array([7, 8]),
        advantages=np.array([0.5, -1.0], dtype=np.float32),
        log_probs=log_probs,
        topk=TopKColumns.encode(
            np.stack([tokens, tokens + 1], axis=1),
            np.stack([log_probs, log_probs - 1], axis=1),
            vocab_size=100,
        ),
        policy_versions=np.zeros(4, dtype=np.int32),
    )


def pack_all(  # type: ignore[no-untyped-def]
    members: list[int],
    pad_multiple: int = 1,
    aggregation: str = "token_mean",
    context: ContextShard | None = None,
):
    return pack(
        two_sequences(),
        np.array(members, dtype=np.int64),
        minibatch=MinibatchSize(tokens=4, sequences=2),
        loss=PolicyLossConfig(aggregation=aggregation),  # type: ignore[arg-type]
        pad_multiple=pad_multiple,
        device=torch.device("cpu"),
        context=context,
    )


def test_a_token_is_predicted_at_the_position_before_it() -> None:
    batch = pack_all([0, 1])
    # The last token of each sequence is no input; rows never cross into the next sequence.
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 20]]
    assert batch.packing.cu_seqlens_q.tolist() == [0, 4, 5]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    assert batch.rows.tolist() == [1, 2, 3, 4]
    assert batch.support.sampled.tolist() == [12, 13, 14, 21]
    assert batch.support.sampled_log_probs.exp().tolist() == pytest.approx([0.5, 0.4, 0.3, 0.2])
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -1.0]
    assert batch.sequence.tolist() == [4, 4, 4, 9]


def test_padding_is_a_sequence_of_its_own_without_rows() -> None:
    batch = pack_all([0, 1], pad_multiple=4)
    assert batch.num_input_tokens == 8
    assert batch.packing.cu_seqlens_q.tolist() == [0, 4, 5, 8]
    assert batch.rows.tolist() == [1, 2, 3, 4]


def test_a_micro_batch_without_sequences_has_input_but_no_rows() -> None:
    batch = pack_all([], pad_multiple=2)
    assert batch.num_input_tokens == 2
    assert batch.rows.numel() == 0


def test_sequence_mean_weights_do_not_depend_on_the_split() -> None:
    whole = pack_all([0, 1], aggregation="sequence_mean").weights.tolist()
    parts = [pack_all([b], aggregation="sequence_mean").weights.tolist() for b in (0, 1)]
    # N / (B * length) with N = 4 tokens, B = 2 sequences.
    assert whole == pytest.approx([4 / 6, 4 / 6, 4 / 6, 4 / 2])
    assert parts[0] + parts[1] == whole


def test_minibatches_keep_groups_whole_and_use_every_sequence_once() -> None:
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 3))
    batches = list(minibatches(group, 4, np.random.default_rng(1)))
    assert [len(members) for members in batches] == [12, 12, 6]
    assert sorted(np.concatenate(batches).tolist()) == list(range(30))
    seen = [set(group[members]) for members in batches]
    assert not seen[0] & seen[1] and not seen[1] & seen[2]


@pytest.mark.parametrize("data_parallel", [1, 2, 3])
def test_micro_batches_cover_the_members_once_and_fit(data_parallel: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 50)
    members = np.flatnonzero(rng.random(50) < 0.7)
    plan = plan_micro_batches(lengths, members, data_parallel=data_parallel, max_tokens=64)
    assert len(plan) == data_parallel
    assert len({len(rank) for rank in plan}) == 1, "ranks meet in every micro-batch"
    used = np.concatenate([batch for rank in plan for batch in rank])
    assert sorted(used.tolist()) == members.tolist()
    assert all(lengths[batch].sum() <= 64 for rank in plan for batch in rank)
    loads = [sum(lengths[batch].sum() for batch in rank) for rank in plan]
    assert max(loads) - min(loads) <= 60


def test_a_sequence_longer_than_the_limit_has_a_micro_batch_of_its_own() -> None:
    plan = plan_micro_batches(np.array([100, 5, 5]), np.arange(3), data_parallel=1, max_tokens=10)
    assert [batch.tolist() for batch in plan[0]] == [[0], [1, 2]]


def test_sequences_stay_on_the_rank_that_has_them() -> None:
    lengths, replica = np.array([5, 6, 7, 8]), np.array([1, 1, 0, 1])
    plan = plan_micro_batches(
        lengths, np.arange(4), data_parallel=2, max_tokens=15, replica=replica
    )
    assert [[batch.tolist() for batch in rank] for rank in plan] == [[[2], []], [[1, 3], [0]]]


def test_fewer_sequences_than_ranks_leave_empty_micro_batches() -> None:
    plan = plan_micro_batches(np.array([5]), np.arange(1), data_parallel=2, max_tokens=10)
    assert [[len(batch) for batch in rank] for rank in plan] == [[1], [0]]


@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_hold_every_token_and_every_row_once(size: int) -> None:
    whole = pack_all([0, 1])
    parts = [pack_all([0, 1], pad_multiple=2, context=ContextShard(r, size)) for r in range(size)]
    lengths = parts[0].packing.cu_seqlens_q.diff()
    assert (lengths % (2 * size) == 0).all()
    assert all(part.num_input_tokens == int(lengths.sum()) // size for part in parts)
    assert all(part.num_input_tokens % 2 == 0 for part in parts)
    order = order_of_gathered(parts[0].packing.cu_seqlens_q, size)
    tokens, positions = (
        torch.cat([getattr(part, name)[0] for part in parts])[order]
        for name in ("input_ids", "position_ids")
    )
    assert positions.tolist() == [i for length in lengths.tolist() for i in range(length)]
    assert tokens[positions < 4][:4].tolist() == [10, 11, 12, 13]
    assert tokens[int(lengths[0])] == 20
    rows = torch.cat([part.gathered_row for part in parts])
    assert rows.sort().values.tolist() == [0, 1, 2, 3]
    for name in ("sequence", "advantages", "weights"):
        joined = torch.cat([getattr(part, name) for part in parts])[rows.argsort()]
        assert torch.equal(joined, getattr(whole, name))
    for part in parts:
        assert torch.equal(part.support.sampled, whole.support.sampled[part.gathered_row])
        predicts = part.position_ids[0, part.rows]
        assert torch.equal(predicts, whole.position_ids[0, whole.rows[part.gathered_row]])
        assert torch.equal(part.gathered_sequence, whole.local_sequence)


def test_a_context_rank_holds_an_early_and_a_late_chunk() -> None:
    cu_seqlens = torch.tensor([0, 8, 12])
    held = [held_positions(cu_seqlens, ContextShard(r, 2)).tolist() for r in range(2)]
    assert held == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_the_number_of_micro_batches_is_made_a_multiple() -> None:
    lengths = np.array([9, 8, 7])
    plan = plan_micro_batches(
        lengths, np.arange(3), data_parallel=1, max_tokens=10, count_multiple=2
    )
    assert [len(batch) for batch in plan[0]] == [1, 1, 1, 0]
