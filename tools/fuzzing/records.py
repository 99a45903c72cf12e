# SPDX-License-Identifier: Apache-2.0
"""Rollout records, through the folder that replay and the analysis read."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron.rl.errors import UserError
from megatron.rl.rollout.protocol import SamplingSettings
from megatron.rl.rollout.records.record import Record, RecordInfo, group_index
from megatron.rl.rollout.records.record_file import METADATA_KEY, write_record
from megatron.rl.rollout.records.record_folder import RecordFolder
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns
from tools.fuzzing.mutations import damaged_bytes, damaged_tree

VOCAB_SIZE, TOP_K, SAMPLES, PROMPTS = 50, 4, 2, 3
_OTHER_TYPES = (
    pa.int8(), pa.int64(), pa.uint32(), pa.float32(), pa.float64(), pa.string(), pa.bool_(),
    pa.list_(pa.int64()), pa.list_(pa.float64()), pa.large_list(pa.int32()),
)  # fmt: skip


def small_record(engine: int) -> Record:
    """Return the part of a batch that one of two engines contributed."""
    rng = np.random.default_rng(engine)
    count = PROMPTS * SAMPLES
    lengths, prompt_lengths = rng.integers(1, 6, count), np.full(count, 3)
    tokens = int(lengths.sum())
    values = -np.sort(rng.exponential(3, (tokens, TOP_K))).astype(np.float32)
    info = RecordInfo(
        purpose="train",
        number=1,
        engine=engine,
        first_sequence=engine * count,
        batch_sequences=2 * count,
        samples_per_prompt=SAMPLES,
        vocab_size=VOCAB_SIZE,
        settings=SamplingSettings(max_tokens=6, top_logprobs=TOP_K, stop_token_ids=(2,)),
        engine_settings={"engine": "vllm"},
    )
    rollouts = Rollouts(
        prompt_index=group_index(count, SAMPLES),
        response_tokens=rng.integers(0, VOCAB_SIZE, tokens).astype(np.int32),
        response_offsets=np.cumsum([0, *lengths]).astype(np.int64),
        log_probs=-rng.exponential(2, tokens).astype(np.float32),
        topk=TopKColumns.encode(
            rng.integers(0, VOCAB_SIZE, (tokens, TOP_K)), values, VOCAB_SIZE, "fp24"
        ),
        policy_versions=np.zeros(tokens, np.int32),
        finished=np.ones(count, bool),
        aborted=np.zeros(count, bool),
        generation_s=1.0,
    )
    return Record(
        info,
        rng.integers(0, VOCAB_SIZE, 3 * count).astype(np.int32),
        np.cumsum([0, *prompt_lengths]).astype(np.int64),
        np.repeat(np.arange(PROMPTS), SAMPLES).astype(np.int64),
        rng.random(count),
        rng.normal(size=count).astype(np.float32),
        rollouts,
    )


class Records:
    """Every way to read a folder of records."""

    name = "record"
    limit_s = 60.0

    def prepare(self, folder: Path) -> None:
        """Write a batch of two engines."""
        self._folder = folder
        self._path = folder / "train-000001-engine1.parquet"
        for engine in (0, 1):
            write_record(folder / f"train-000001-engine{engine}.parquet", small_record(engine))
        self._good = self._path.read_bytes()
        self._table = pq.read_table(self._path)
        self._read()

    def attempt(self, rng: random.Random) -> bool:
        """Damage one of the two files: its bytes, its columns, or what they hold."""
        match rng.randrange(4):
            case 0 | 1:
                self._path.write_bytes(damaged_bytes(rng, self._good))
            case 2:
                self._write(self._other_metadata(rng))
            case _:
                self._write(_other_columns(rng, self._table))
        try:
            self._read()
        except UserError:
            return False
        return True

    def close(self) -> None:
        """Nothing is open."""

    def _read(self) -> None:
        records = RecordFolder(self._folder)
        for number in records.numbers():
            records.info("train", number)
            records.prompt_ids("train", number)
            total = records.info("train", number).batch_sequences
            records.sequences("train", number, 0, min(total, 3))
            record = records.batch("train", number)
            record.rollouts.topk.decode()

    def _write(self, table: pa.Table) -> None:
        try:
            pq.write_table(table, self._path, row_group_size=4)
        except pa.ArrowException:  # Parquet holds no such table
            self._path.write_bytes(b"")

    def _other_metadata(self, rng: random.Random) -> pa.Table:
        info = json.loads(self._table.schema.metadata[METADATA_KEY.encode()])
        text = json.dumps(damaged_tree(rng, info)).encode()
        if rng.random() < 0.2:
            text = damaged_bytes(rng, text)
        return self._table.replace_schema_metadata({METADATA_KEY: text})


def _other_columns(rng: random.Random, table: pa.Table) -> pa.Table:
    metadata, place = table.schema.metadata, rng.randrange(table.num_columns)
    name, column = table.column_names[place], table.column(place)
    match rng.randrange(7):
        case 0:
            table = table.drop_columns([name])
        case 1:
            table = table.rename_columns(
                [other if other != name else "other" for other in table.column_names]
            )
        case 2:
            other = pa.array([None] * len(table), rng.choice((*_OTHER_TYPES, column.type)))
            table = table.set_column(place, name, other)
        case 3:
            rows = rng.choices(range(len(table)), k=rng.choice((0, 1, len(table), 3 * len(table))))
            table = table.take(pa.array(rows, pa.int64()))
        case 4:
            table = table.set_column(place, name, column.take(pa.array(
                rng.choices(range(len(table)), k=len(table)))))  # fmt: skip
        case 5:
            table = table.select(rng.sample(table.column_names, table.num_columns))
        case _:
            values = [_other_value(rng, value) for value in column.to_pylist()]
            table = table.set_column(place, name, _as_type(values, column.type))
    return table.replace_schema_metadata(metadata)


def _other_value(rng: random.Random, value: Any) -> Any:
    """Change a value, or an entry of a list, within its type; sometimes to null."""
    if rng.random() < 0.6:
        return value
    if isinstance(value, list):
        if not value or rng.random() < 0.3:
            return rng.choice((None, [], value + value, value[:1]))
        place = rng.randrange(len(value))
        return [*value[:place], _other_value(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, float):
        return rng.choice((None, 0.0, 5.0, 1e30, float("nan"), float("inf"), float("-inf")))
    return rng.choice((None, 0, -1, 1, VOCAB_SIZE, 2**31 - 1, -(2**31)))


def _as_type(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError):
        return pa.array([None] * len(values), kind)
