# SPDX-License-Identifier: Apache-2.0
"""Every rank gets exactly what its replica trains on, bit for bit, and not a byte more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from megatron.rl.parallel import ParallelConfig
from megatron.rl.rollout.topk_columns import Precision
from tests.parallel.spawn import run_ranks

VOCAB_SIZE = 151_936
TOP_K = 20
GROUPS = 7
SAMPLES = 3
EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """A layout on one node or two."""

    layout: ParallelConfig
    engines_per_node: int
    nodes: int = 1
    precision: Precision = "fp24"


CASES = [
    Case(ParallelConfig(data=4), 1),
    Case(ParallelConfig(data=4), 4),
    Case(ParallelConfig(data=4), 1, nodes=2, precision="float32"),
    Case(ParallelConfig(tensor=2, data=2), 2),
    Case(ParallelConfig(context=2, data=2), 4),
    Case(ParallelConfig(pipeline=2, data=2), 1, nodes=2),
    Case(ParallelConfig(tensor=2, pipeline=2), 3),
]


def whole_batch(precision: Precision):  # type: ignore[no-untyped-def]
    """The rollout batch, which every rank can make for itself to compare with."""
    from megatron.rl.batch import Sequences
    from megatron.rl.rollout.topk_columns import TopKColumns

    rng = np.random.default_rng(0)
    count = GROUPS * SAMPLES
    prompts, responses = rng.integers(1, 6, count), rng.integers(1, 40, count)
    tokens = int(responses.sum())
    ids = rng.integers(0, VOCAB_SIZE, (tokens, TOP_K))
    values = -np.sort(rng.exponential(3, (tokens, TOP_K))).astype(np.float32)
    return Sequences(
        number=np.arange(count),
        prompt_tokens=rng.integers(0, VOCAB_SIZE, int(prompts.sum())).astype(np.int32),
        prompt_offsets=np.cumsum([0, *prompts]),
        response_tokens=rng.integers(0, VOCAB_SIZE, tokens).astype(np.int32),
        response_offsets=np.cumsum([0, *responses]),
        group=np.repeat(np.arange(GROUPS), SAMPLES),
        advantages=rng.normal(size=count).astype(np.float32),
        log_probs=-rng.exponential(2, tokens).astype(np.float32),
        topk=TopKColumns.encode(ids, values, VOCAB_SIZE, precision),
        policy_versions=rng.integers(0, 3, tokens).astype(np.int32),
    )


def some_of(sequences, numbers):  # type: ignore[no-untyped-def]
    """The sequences with these numbers, one by one."""
    from megatron.rl.batch import Sequences

    prompts, responses = (
        np.concatenate([np.arange(0)] + [np.arange(*offsets[b : b + 2]) for b in numbers])
        for offsets in (sequences.prompt_offsets, sequences.response_offsets)
    )
    return Sequences(
        number=np.asarray(numbers),
        prompt_tokens=sequences.prompt_tokens[prompts],
        prompt_offsets=np.cumsum([0, *np.diff(sequences.prompt_offsets)[numbers]]),
        response_tokens=sequences.response_tokens[responses],
        response_offsets=np.cumsum([0, *sequences.response_lengths[numbers]]),
        group=sequences.group[numbers],
        advantages=sequences.advantages[numbers],
        log_probs=sequences.log_probs[responses],
        topk=sequences.topk.take(responses),
        policy_versions=sequences.policy_versions[responses],
    )


def exchange_on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[list[int]]:
    """Run each case; return the bytes that this rank received in each epoch of it."""
    from megatron.core import parallel_state

    from megatron.rl import cpu_backend
    from megatron.rl.parallel import build_groups

    cpu_backend.install()
    received = []
    for case in cases:
        build_groups(case.layout, seed=1)
        received.append(_exchange(rank, world_size, case))
        parallel_state.destroy_model_parallel()
    return received


def _exchange(rank: int, world_size: int, case: Case) -> list[int]:
    from megatron.core import parallel_state

    from megatron.rl.exchange import Exchange, SequenceTable, TopKForm
    from megatron.rl.rollout.topology import plan_topology

    topology = plan_topology(
        case.layout,
        ranks_per_node=world_size // case.nodes,
        engines_per_node=case.engines_per_node,
        seed=0,
    )
    replica = topology.replica_of(rank)
    assert replica == parallel_state.get_data_parallel_rank()
    leads = [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    ]
    assert (rank in topology.readers) == (leads == [0, 0, 0])

    whole, own, table = whole_batch(case.precision), None, None
    engine = topology.engine_of(rank)
    if engine is not None:
        share = topology.split(GROUPS, "prompts")[engine.number]
        own = some_of(whole, np.arange(share.start * SAMPLES, share.stop * SAMPLES))
        table = SequenceTable(
            own.group,
            np.diff(own.prompt_offsets),
            own.response_lengths,
            rewards=own.number / 100,
            advantages=own.advantages,
            finished=own.number % 2 == 0,
            versions=own.number.astype(np.int32),
            in_loss=own.number >= 0,
        )
    exchange = Exchange(topology, case.layout, TopKForm(TOP_K, VOCAB_SIZE, case.precision))
    tables = exchange.gather_reports(table)
    everything = SequenceTable.join(tables)
    assert everything.rewards.tolist() == (np.arange(len(whole)) / 100).tolist()
    assert everything.input_lengths.tolist() == whole.input_lengths.tolist()

    received, before = [], 0
    for epoch in range(EPOCHS):
        # Another assignment each epoch; in the last, replica 0 trains on nothing if it can.
        rng = np.random.default_rng(epoch)
        assigned = rng.integers(0 if epoch == 0 else case.layout.data > 1, case.layout.data, 21)
        got = exchange.distribute(own, tables, assigned)
        expected = some_of(whole, np.flatnonzero(assigned == replica))
        _assert_same(got, expected, behavior=_needs_behavior(leads[1], case, rank, topology))
        received.append(exchange.received_bytes - before)
        before = exchange.received_bytes
    return received


def _needs_behavior(stage, case, rank, topology) -> bool:  # type: ignore[no-untyped-def]
    return stage == case.layout.pipeline - 1 or rank in topology.readers


def _assert_same(got, expected, *, behavior: bool) -> None:  # type: ignore[no-untyped-def]
    for field in dataclasses.fields(expected):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "topk":
            assert a.k == (TOP_K if behavior else 0)
            if behavior:
                for name, array in b.arrays().items():
                    assert a.arrays()[name].tobytes() == array.tobytes(), name
        elif behavior or field.name not in ("log_probs", "policy_versions"):
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name


@pytest.fixture(scope="module")
def received() -> list[list[list[int]]]:
    """By rank, case and epoch; the ranks themselves have compared what they got."""
    return run_ranks(exchange_on_ranks, 4, CASES)


def nbytes(sequences, behavior: bool = True) -> int:  # type: ignore[no-untyped-def]
    tokens = sequences.prompt_tokens.nbytes + sequences.response_tokens.nbytes
    if not behavior:
        return int(tokens)
    return int(
        tokens + sequences.log_probs.nbytes + sequences.policy_versions.nbytes
        + sequences.topk.nbytes
    )  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_no_rank_receives_more_than_it_trains_on(
    received: list[list[list[int]]], number: int
) -> None:
    from megatron.rl.rollout.topology import plan_topology

    case = CASES[number]
    topology = plan_topology(
        case.layout,
        ranks_per_node=4 // case.nodes,
        engines_per_node=case.engines_per_node,
        seed=0,
    )
    whole = whole_batch(case.precision)
    shares = topology.split(GROUPS, "prompts")
    for epoch in range(EPOCHS):
        rng = np.random.default_rng(epoch)
        assigned = rng.integers(0 if epoch == 0 else case.layout.data > 1, case.layout.data, 21)
        for rank in range(4):
            numbers = np.flatnonzero(assigned == topology.replica_of(rank))
            if rank in topology.readers and (engine := topology.engine_of(rank)) is not None:
                share = shares[engine.number]
                inside = (numbers >= share.start * SAMPLES) & (numbers < share.stop * SAMPLES)
                numbers = numbers[~inside]
            stage = rank // case.layout.stage_size
            behavior = _needs_behavior(stage, case, rank, topology)
            expected = nbytes(some_of(whole, numbers), behavior)
            assert received[rank][number][epoch] == expected, (rank, epoch)


def test_a_message_of_another_size_is_refused() -> None:
    from megatron.rl.exchange import SequenceTable, TopKForm, _message, _Share

    whole = whole_batch("fp24")
    table = SequenceTable(
        whole.group,
        np.diff(whole.prompt_offsets),
        whole.response_lengths,
        rewards=np.zeros(len(whole)),
        advantages=whole.advantages,
        finished=np.ones(len(whole), dtype=np.bool_),
        versions=np.zeros(len(whole), dtype=np.int32),
        in_loss=np.ones(len(whole), dtype=np.bool_),
    )
    share = _Share.empty(np.arange(21), table, TopKForm(TOP_K, VOCAB_SIZE, "fp24"))
    with pytest.raises(RuntimeError, match="bytes for sequences 0 to 4, expected"):
        share.fill(_message(whole, np.arange(4)), slice(0, 5))


def test_a_token_takes_what_the_columns_take() -> None:
    """117 bytes a response token with K = 20: what is stored is what travels."""
    whole = whole_batch("fp24")
    per_token = nbytes(whole) - whole.prompt_tokens.nbytes
    assert per_token == 117 * len(whole.response_tokens)
