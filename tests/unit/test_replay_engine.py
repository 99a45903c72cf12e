# SPDX-License-Identifier: Apache-2.0
"""Replay: the recorded rollouts bit for bit, however they are asked for, and nothing else."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megatron.rl.errors import UserError
from megatron.rl.rollout.errors import EngineRequestError
from megatron.rl.rollout.protocol import GenerationRequest
from megatron.rl.rollout.records.record import Record
from megatron.rl.rollout.records.record_folder import RecordFolder, RecordWriter
from megatron.rl.rollout.replay_engine import ReplayEngine
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts
from tests.unit.test_records import SAMPLES, make_record, write_two_engines

PROMPTS = 5


def request_for(record: Record, start: int, stop: int) -> GenerationRequest:
    """The request that prompts ``[start, stop)`` of a record answer."""
    return GenerationRequest.from_lists(
        [record.prompt(place * SAMPLES).tolist() for place in range(start, stop)],
        SAMPLES,
        record.info.settings,
        start * SAMPLES,
    )


def recorded(folder: Path, numbers: tuple[int, ...] = (1,)) -> list[Record]:
    for number in numbers:
        write_two_engines(folder, number)
    return list(RecordFolder(folder).batches())


def assert_same(rollouts: Rollouts, expected: Rollouts) -> None:
    for name, array in expected.arrays().items():
        assert rollouts.arrays()[name].tobytes() == array.tobytes(), name


def engine_at(folder: Path, version: int = 4) -> ReplayEngine:
    engine = ReplayEngine(folder)
    engine.update_weights([], version)
    return engine


@pytest.mark.parametrize("edges", [(0, 5), (0, 2, 5), (0, 1, 3, 4, 5)])
def test_any_number_of_owners_gets_the_recorded_rollouts(
    tmp_path: Path, edges: tuple[int, ...]
) -> None:
    records = recorded(tmp_path, (1, 2))
    owners = [engine_at(tmp_path) for _ in edges[1:]]
    for record in records:
        for owner, start, stop in zip(owners, edges, edges[1:], strict=False):
            answer = owner.generate(request_for(record, start, stop))
            assert_same(answer, record.rows(start * SAMPLES, stop * SAMPLES).rollouts)


def test_finished_sequences_are_announced(tmp_path: Path) -> None:
    (record,) = recorded(tmp_path)
    heard: list[FinishedSequences] = []
    answer = engine_at(tmp_path).generate(request_for(record, 1, 3), heard.append)
    ended = np.flatnonzero(~answer.aborted)
    assert 0 < len(ended) < 2 * SAMPLES  # an aborted sequence has not ended
    (part,) = heard
    assert part.index.tolist() == ended.tolist()
    assert_same(part.rollouts, answer.select(ended))


def test_the_end_of_the_records_is_an_error(tmp_path: Path) -> None:
    (record,) = recorded(tmp_path)
    engine = engine_at(tmp_path)
    engine.generate(request_for(record, 0, PROMPTS))
    with pytest.raises(UserError, match=r"no further train batch \(recorded: 1\)"):
        engine.generate(request_for(record, 0, PROMPTS))
    heldout = dataclasses.replace(record.info.settings, training=False)
    with pytest.raises(UserError, match="no further heldout batch"):
        engine.generate(dataclasses.replace(request_for(record, 0, PROMPTS), settings=heldout))


def test_other_settings_and_prompts_are_refused(tmp_path: Path) -> None:
    (record,) = recorded(tmp_path)
    engine, request = engine_at(tmp_path), request_for(record, 0, PROMPTS)
    for change, words in (
        ({"temperature": 0.9}, "temperature 1.0, this run asks for 0.9"),
        ({"seed": 8}, "seed 7, this run asks for 8 .*run.seed"),
        ({"topk_precision": "float32"}, "topk_precision fp24"),
    ):
        settings = dataclasses.replace(record.info.settings, **change)
        with pytest.raises(UserError, match=f"train batch 1 .* was sampled with {words}"):
            engine.generate(dataclasses.replace(request, settings=settings))
    with pytest.raises(UserError, match="has 4 responses to a prompt, this run asks for 2"):
        engine.generate(dataclasses.replace(request, samples_per_prompt=2))
    tokens = request.prompt_tokens.copy()
    tokens[request.prompt_offsets[3]] += 1
    with pytest.raises(UserError, match="another prompt at sequence 12"):
        engine.generate(dataclasses.replace(request, prompt_tokens=tokens))
    with pytest.raises(UserError, match="has 20 sequences, asked for 8 to 28"):
        engine.generate(dataclasses.replace(request, first_sequence_index=8))
    # A refusal uses nothing up.
    assert_same(engine.generate(request), record.rollouts)


def test_versions_never_fall_and_are_those_of_the_record(tmp_path: Path) -> None:
    (record,) = recorded(tmp_path)
    engine = engine_at(tmp_path, version=3)
    with pytest.raises(UserError, match="policy version 4, this run is at 3"):
        engine.generate(request_for(record, 0, PROMPTS))
    with pytest.raises(EngineRequestError, match="version 2 after 3"):
        engine.update_weights([], 2)
    engine.update_weights([], 4)
    assert_same(engine.generate(request_for(record, 0, PROMPTS)), record.rollouts)


def test_records_that_begin_later_are_refused(tmp_path: Path) -> None:
    """Whatever is asked for first: the evaluation at the start has been removed as well."""
    record = make_record(number=3)
    RecordWriter(tmp_path).write(record)
    heldout = dataclasses.replace(record.info.settings, training=False)
    request = request_for(record, 0, 1)
    for asked in (request, dataclasses.replace(request, settings=heldout)):
        with pytest.raises(
            UserError, match=r"no train batch 1, the next one .* is 3; records\.keep"
        ):
            engine_at(tmp_path).generate(asked)


def test_a_replay_may_go_on_anywhere(tmp_path: Path) -> None:
    records = recorded(tmp_path, (1, 2, 3))
    engine = engine_at(tmp_path)
    engine.skip(2)
    assert_same(engine.generate(request_for(records[2], 0, PROMPTS)), records[2].rollouts)
    with pytest.raises(UserError, match=r"no further train batch \(recorded: 3\)"):
        engine.generate(request_for(records[2], 0, PROMPTS))


def test_a_missing_batch_is_refused(tmp_path: Path) -> None:
    records = recorded(tmp_path, (1, 3))
    engine = engine_at(tmp_path)
    engine.generate(request_for(records[0], 0, PROMPTS))
    with pytest.raises(UserError, match="no train batch 2, the next one there is 3"):
        engine.generate(request_for(records[1], 0, PROMPTS))


def test_skipping_leaves_the_evaluations_that_are_still_to_come(tmp_path: Path) -> None:
    for number in (0, 2, 4):
        record = make_record(PROMPTS, number=number)
        info = dataclasses.replace(
            record.info,
            purpose="heldout",
            settings=dataclasses.replace(record.info.settings, training=False),
        )
        RecordWriter(tmp_path).write(dataclasses.replace(record, info=info))
    engine = engine_at(tmp_path)
    engine.skip(2)
    for number in (2, 4):
        record = RecordFolder(tmp_path).batch("heldout", number)
        assert_same(engine.generate(request_for(record, 0, PROMPTS)), record.rollouts)


def test_prompt_ids_are_those_of_the_groups(tmp_path: Path) -> None:
    (record,) = recorded(tmp_path)
    engine = engine_at(tmp_path)
    assert engine.prompt_ids(1).tolist() == record.prompt_ids[::SAMPLES].tolist()
    with pytest.raises(UserError, match=r"the next batch of .* is 1, this run asks for 2"):
        engine.prompt_ids(2)


def test_a_batch_without_sequences_is_recorded_and_passed_over(tmp_path: Path) -> None:
    record = make_record(PROMPTS, number=1)
    info = dataclasses.replace(record.info, batch_sequences=0)
    RecordWriter(tmp_path).write(dataclasses.replace(record.rows(0, 0), info=info))
    write_two_engines(tmp_path, 2)
    empty, full = RecordFolder(tmp_path).batches()
    assert len(empty) == 0 and len(full) == PROMPTS * SAMPLES
    engine = engine_at(tmp_path)
    assert engine.prompt_ids(1).tolist() == []
    engine.skip(1)
    assert_same(engine.generate(request_for(full, 0, PROMPTS)), full.rollouts)
