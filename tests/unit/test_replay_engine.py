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
    RecordWriter(tmp_path).write(make_record(number=3))
    with pytest.raises(UserError, match=r"begin with batch 3, .*records\.keep"):
        ReplayEngine(tmp_path)
