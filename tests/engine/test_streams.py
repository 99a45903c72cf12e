# SPDX-License-Identifier: Apache-2.0
"""Answers in parts: back-pressure in the worker, assembly in the client, bytes on the wire."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from megatron.rl.rollout.client.collector import SequenceCollector
from megatron.rl.rollout.errors import RolloutDataError
from megatron.rl.rollout.messages import sequences_from_arrays, sequences_message
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns
from megatron.rl.rollout.wire import Channel, Message, WireClosed, WireError, WireTimeout
from megatron.rl.rollout.worker.worker_link import MAX_WAITING_MESSAGES, WorkerLink

VOCAB_SIZE = 151_936
REQUEST = GenerationRequest.from_lists(
    [[1], [2]], 3, SamplingSettings(max_tokens=300, top_logprobs=20, seed=0)
)


def some_rollouts(lengths: list[int], k: int = 20, seed: int = 0) -> Rollouts:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    ids = rng.integers(0, VOCAB_SIZE, (n, k))
    log_probs = -np.sort(np.exp(rng.normal(size=(n, k))), axis=1)
    return Rollouts(
        prompt_index=np.arange(len(lengths), dtype=np.int32) // REQUEST.samples_per_prompt,
        response_tokens=rng.integers(0, VOCAB_SIZE, n).astype(np.int32),
        response_offsets=np.cumsum([0, *lengths], dtype=np.int64),
        log_probs=-np.exp(rng.normal(size=n)).astype(np.float32),
        topk=TopKColumns.encode(ids, log_probs, VOCAB_SIZE),
        policy_versions=np.zeros(n, dtype=np.int32),
        finished=rng.random(len(lengths)) < 0.5,
        aborted=np.zeros(len(lengths), dtype=bool),
        generation_s=0.0,
    )


def identical(left: Rollouts, right: Rollouts) -> bool:
    arrays = right.arrays()
    return all(array.tobytes() == arrays[name].tobytes() for name, array in left.arrays().items())


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def test_a_token_takes_at_most_128_bytes_of_a_real_frame(ends):
    rollouts = some_rollouts([256] * 64)
    part = FinishedSequences(np.arange(64), rollouts)
    message = sequences_message(1, part)
    sender = threading.Thread(target=Channel(ends[0]).send, args=(message, 10))
    sender.start()
    prefix = ends[1].recv(16, socket.MSG_WAITALL)
    _, header_bytes, payload_bytes = struct.unpack("<4sIQ", prefix)
    frame = ends[1].recv(header_bytes + payload_bytes, socket.MSG_WAITALL)
    sender.join()
    assert len(frame) == header_bytes + payload_bytes, "nothing follows the frame"
    per_token = (len(prefix) + len(frame)) / rollouts.num_tokens
    # 20 entries of 5.25 bytes, id, log-prob, version; 22 bytes a sequence, and the header.
    assert 117 < per_token <= 128
    assert per_token == pytest.approx(117, abs=0.2)


def test_sequences_cross_the_wire_unchanged(ends):
    part = FinishedSequences(np.array([4, 0]), some_rollouts([3, 5]))
    Channel(ends[0]).send(sequences_message(1, part), 5)
    got = sequences_from_arrays(Channel(ends[1]).receive(5).arrays)
    np.testing.assert_array_equal(got.index, part.index)
    assert identical(got.rollouts, part.rollouts)
    for name in part.rollouts.arrays():
        arrays = {**part.rollouts.arrays(), "index": part.index}
        del arrays[name]
        with pytest.raises(RolloutDataError):
            sequences_from_arrays(arrays)
    with pytest.raises(RolloutDataError, match="numbers"):
        sequences_from_arrays(part.rollouts.arrays())


def test_parts_in_any_order_give_the_same_rollouts():
    whole = some_rollouts([3, 0, 300, 1, 7, 2])
    for order in ([[0, 1, 2, 3, 4, 5]], [[5, 2], [4], [0, 3, 1]], [[0, 1], [1, 2, 0, 5], [3, 4]]):
        delivered: list[int] = []
        collector = SequenceCollector(
            REQUEST, VOCAB_SIZE, lambda part, seen=delivered: seen.extend(part.index)
        )
        for index in order:
            assert collector.missing() > 0
            collector.add(FinishedSequences(np.array(index), whole.select(np.array(index))))
        assert collector.missing() == 0
        assert identical(collector.rollouts(2.5), whole)
        assert collector.rollouts(2.5).generation_s == 2.5
        assert sorted(delivered) == list(range(6)), "each sequence is delivered once"


def test_what_did_not_arrive_counts_as_aborted_and_is_not_delivered():
    whole = some_rollouts([3, 4, 5, 1, 7, 2])
    delivered: list[FinishedSequences] = []
    collector = SequenceCollector(REQUEST, VOCAB_SIZE, delivered.append)
    part = whole.select(np.array([1, 4]))
    part.aborted[:] = [True, False]
    part.finished[:] = [False, True]
    collector.add(FinishedSequences(np.array([1, 4]), part))
    collector.abort_missing()
    rollouts = collector.rollouts(0.0)
    rollouts.validate(VOCAB_SIZE)
    assert rollouts.lengths.tolist() == [0, 4, 0, 0, 7, 0]
    assert rollouts.aborted.tolist() == [True, True, True, True, False, True]
    assert rollouts.prompt_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert [(d.index.tolist(), d.rollouts.lengths.tolist()) for d in delivered] == [([4], [7])]
    assert identical(delivered[0].rollouts, part.select(np.array([1])))


@pytest.mark.parametrize(
    ("index", "k", "message"),
    [([0, 6], 20, "of 6"), ([-1, 0], 20, "of 6"), ([1, 1], 20, "twice"), ([0, 1], 19, "top 19")],
)
def test_parts_of_another_request_are_refused(index, k, message):
    collector = SequenceCollector(REQUEST, VOCAB_SIZE, None)
    with pytest.raises(RolloutDataError, match=message):
        collector.add(FinishedSequences(np.array(index), some_rollouts([1, 2], k)))


# Larger than what the socket holds, so that a message is only gone once it is read.
BIG = Message("sequences", {}, {"a": np.zeros(1 << 20, dtype=np.uint8)})


def test_the_worker_waits_while_nobody_reads(ends):
    link = WorkerLink(Channel(ends[0]), send_timeout_s=30)
    sent = []

    def produce() -> None:
        for number in range(MAX_WAITING_MESSAGES + 5):
            link.send(BIG)
            sent.append(number)

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    time.sleep(0.5)
    # One is being written, the queue is full, and the next has to wait: memory is bounded.
    assert len(sent) == MAX_WAITING_MESSAGES + 1
    reader = Channel(ends[1])
    for _ in range(MAX_WAITING_MESSAGES + 5):
        assert reader.receive(5).kind == "sequences"
    producer.join(5)
    assert len(sent) == MAX_WAITING_MESSAGES + 5


def test_a_reader_that_stays_away_ends_the_worker(ends):
    link = WorkerLink(Channel(ends[0]), send_timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(WireTimeout):
        for _ in range(MAX_WAITING_MESSAGES + 5):
            link.send(BIG)
    assert 0.2 <= time.monotonic() - started < 5
    with pytest.raises(WireTimeout):
        link.flush()


def test_an_answer_that_cannot_be_written_ends_the_worker(ends):
    """It would wait for its own thread otherwise, and the client for an answer."""
    link = WorkerLink(Channel(ends[0]), send_timeout_s=30)
    link.send(Message("progress", {"no JSON": object()}))
    with pytest.raises(WireError, match="not JSON serializable"):
        link.flush()


def test_an_abort_is_seen_while_the_worker_is_busy_with_answers(ends):
    link, client = WorkerLink(Channel(ends[0]), send_timeout_s=30), Channel(ends[1])
    for _ in range(3):
        link.send(BIG)  # nobody reads: both directions are in use at once
    client.send(Message("generate", {"id": 7}), 5)
    assert link.receive().fields["id"] == 7
    assert not link.aborted(7)
    client.send(Message("abort", {"request": 7}), 5)
    deadline = time.monotonic() + 5
    while not link.aborted(7) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert link.aborted(7) and not link.aborted(8)
    for _ in range(3):
        client.receive(5)
    link.flush()
    ends[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(WireClosed):
        link.receive()
