# SPDX-License-Identifier: Apache-2.0
"""Records: what was written is read again bit for bit, and whatever is no record is refused."""

import dataclasses
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.rl.errors import UserError
from megatron.rl.rollout.protocol import SamplingSettings
from megatron.rl.rollout.records.record import Record, RecordInfo, group_index
from megatron.rl.rollout.records.record_file import METADATA_KEY, ROWS_PER_GROUP, read_record
from megatron.rl.rollout.records.record_folder import RecordFolder, RecordWriter
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import Precision, TopKColumns

VOCAB_SIZE = 151_936
SAMPLES = 4


def make_record(
    prompts: int = 20,
    *,
    k: int = 20,
    precision: Precision = "fp24",
    number: int = 1,
    engine: int = 0,
    first_prompt: int = 0,
    total_prompts: int | None = None,
) -> Record:
    """Ragged random sequences, with absent entries, aborted sequences and two versions."""
    rng = np.random.default_rng([number, first_prompt, k])
    count = prompts * SAMPLES
    lengths = rng.integers(1, 9, count)
    prompt_lengths = np.repeat(rng.integers(1, 6, prompts), SAMPLES)
    tokens = int(lengths.sum())
    ids = rng.integers(0, VOCAB_SIZE, (tokens, k))
    values = -np.sort(rng.exponential(3, (tokens, k))).astype(np.float32)
    ids[::5, k - 1 :], values[::5, k - 1 :] = -1, -np.inf
    finished = rng.random(count) < 0.7
    rollouts = Rollouts(
        prompt_index=group_index(count, SAMPLES),
        response_tokens=rng.integers(0, VOCAB_SIZE, tokens).astype(np.int32),
        response_offsets=np.cumsum([0, *lengths]).astype(np.int64),
        log_probs=-rng.exponential(2, tokens).astype(np.float32),
        topk=TopKColumns.encode(ids, values, VOCAB_SIZE, precision),
        policy_versions=rng.integers(3, 5, tokens).astype(np.int32),
        finished=finished,
        aborted=~finished & (rng.random(count) < 0.5),
        generation_s=1.5,
    )
    settings = SamplingSettings(
        max_tokens=9, top_logprobs=k, topk_precision=precision, seed=7, stop_token_ids=(2, 3)
    )
    info = RecordInfo(
        purpose="train",
        number=number,
        engine=engine,
        first_sequence=first_prompt * SAMPLES,
        batch_sequences=SAMPLES * (prompts if total_prompts is None else total_prompts),
        samples_per_prompt=SAMPLES,
        vocab_size=VOCAB_SIZE,
        settings=settings,
        engine_settings={"engine": "vllm", "model_path": "runs/tiny-model"},
    )
    return Record(
        info,
        rng.integers(0, VOCAB_SIZE, int(prompt_lengths.sum())).astype(np.int32),
        np.cumsum([0, *prompt_lengths]).astype(np.int64),
        np.repeat(np.arange(prompts) + first_prompt, SAMPLES).astype(np.int64) + (1 << 62),
        rng.random(count),
        rng.normal(size=count).astype(np.float32),
        rollouts,
    )


def assert_same(record: Record, other: Record) -> None:
    """Every array equal in dtype and bits."""
    for a, b in zip(_arrays(record), _arrays(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def _arrays(record: Record) -> list[np.ndarray]:
    values = [getattr(record, f.name) for f in dataclasses.fields(Record)]
    own = [value for value in values if isinstance(value, np.ndarray)]
    return [*own, *record.rollouts.arrays().values()]


@pytest.mark.parametrize("k", [20, 1, 0])
@pytest.mark.parametrize("precision", ["fp24", "float32"])
def test_read_equals_written(tmp_path: Path, k: int, precision: Precision) -> None:
    record = make_record(k=k, precision=precision)
    assert len(record) > ROWS_PER_GROUP, "several row groups"
    read = read_record(RecordWriter(tmp_path).write(record))
    assert read.info == record.info
    assert_same(read, record)


def test_the_columns_are_plain_for_other_readers(tmp_path: Path) -> None:
    record = make_record(3)
    path = RecordWriter(tmp_path).write(record)
    table = pq.read_table(path)
    ids, log_probs = record.rollouts.topk.decode()
    flat = table["topk_ids"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(flat.reshape(-1, 20), ids)
    flat = table["topk_log_probs"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(flat.reshape(-1, 20), log_probs)
    row = table.slice(5, 1).to_pylist()[0]
    assert row["sequence"] == 5 and row["prompt_id"] == record.prompt_ids[5]
    assert row["response_tokens"] == record.rollouts.response(5).tolist()
    assert row["prompt_tokens"] == record.prompt(5).tolist()
    assert row["reward"] == record.rewards[5] and row["advantage"] == record.advantages[5]
    info = json.loads(pq.read_schema(path).metadata[METADATA_KEY.encode()])
    assert info["settings"]["max_tokens"] == 9 and info["vocab_size"] == VOCAB_SIZE
    assert info["engine_settings"]["engine"] == "vllm" and info["format_version"] == 1


def test_real_columns_are_split_into_byte_streams(tmp_path: Path) -> None:
    path = RecordWriter(tmp_path).write(make_record(3))
    row_group = pq.read_metadata(path).row_group(0)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    encodings = {column.path_in_schema.split(".")[0]: column.encodings for column in columns}
    for name in ("topk_ids", "topk_log_probs", "log_probs", "response_tokens"):
        assert "BYTE_STREAM_SPLIT" in encodings[name]
    assert "RLE_DICTIONARY" in encodings["prompt_tokens"]
    assert {column.compression for column in columns} == {"ZSTD"}


def write_two_engines(folder: Path, number: int = 1, keep: int = 0) -> None:
    for engine, (first, prompts) in enumerate([(0, 3), (3, 2)]):
        record = make_record(
            prompts, number=number, engine=engine, first_prompt=first, total_prompts=5
        )
        RecordWriter(folder, keep).write(record)


def test_records_written_in_the_background_are_there_after_close(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, keep=2)
    records = [make_record(3, number=number) for number in (1, 2, 3)]
    for record in records:
        writer.write_later(record)
    writer.close()
    folder = RecordFolder(tmp_path)
    assert folder.numbers() == [2, 3]
    for record in records[1:]:
        assert_same(folder.batch("train", record.info.number), record)


def test_a_batch_is_joined_and_split_again(tmp_path: Path) -> None:
    write_two_engines(tmp_path)
    folder = RecordFolder(tmp_path)
    whole = folder.batch("train", 1)
    assert len(whole) == 20
    assert whole.rollouts.prompt_index.tolist() == np.repeat(np.arange(5), SAMPLES).tolist()
    first = make_record(3, total_prompts=5)
    second = make_record(2, engine=1, first_prompt=3, total_prompts=5)
    assert_same(whole.rows(0, 12), first)
    assert_same(whole.rows(12, 20), second)
    # Another split, across the border between the files.
    middle = folder.sequences("train", 1, 8, 16)
    assert middle.info.first_sequence == 8
    assert_same(Record.join([whole.rows(0, 8), middle, whole.rows(16, 20)]), whole)
    assert [record.info.number for record in folder.batches()] == [1]


def test_only_the_newest_batches_are_kept(tmp_path: Path) -> None:
    for number in (9, 10, 11):
        write_two_engines(tmp_path, number, keep=2)
    (tmp_path / "notes.txt").write_text("not ours")
    assert RecordFolder(tmp_path).numbers() == [10, 11]
    assert RecordFolder(tmp_path).numbers("heldout") == []
    assert len(list(tmp_path.glob("*.parquet"))) == 4


def test_files_of_more_engines_than_wrote_the_batch_are_left_out(tmp_path: Path) -> None:
    """A run that went on with one engine instead of two wrote the batch again."""
    write_two_engines(tmp_path)
    again = make_record(5)
    RecordWriter(tmp_path).write(again)
    assert_same(RecordFolder(tmp_path).batch("train", 1), again)


def test_a_missing_file_of_a_batch_is_missed(tmp_path: Path) -> None:
    write_two_engines(tmp_path)
    (tmp_path / "train-000001-engine1.parquet").unlink()
    with pytest.raises(UserError, match=r"20 sequences, but .* none from sequence 12 on"):
        RecordFolder(tmp_path).batch("train", 1)
    # As many sequences, but some of them twice.
    overlapping = make_record(2, engine=1, first_prompt=2, total_prompts=5)
    RecordWriter(tmp_path).write(overlapping)
    with pytest.raises(UserError, match="none from sequence 12 on"):
        RecordFolder(tmp_path).batch("train", 1)
    with pytest.raises(UserError, match="has no train batch 2"):
        RecordFolder(tmp_path).batch("train", 2)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="no rollout records in"):
            RecordFolder(folder)


def test_foreign_and_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    good = RecordWriter(tmp_path / "good").write(make_record(3))
    content = good.read_bytes()
    bad = tmp_path / "train-000001-engine0.parquet"

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match) as caught:
            read_record(bad)
        assert str(bad) in str(caught.value) and "\n" not in str(caught.value)

    bad.write_text("no parquet at all")
    refused("not a readable rollout record")
    bad.write_bytes(content[: len(content) // 2])
    refused("not a readable rollout record")
    pq.write_table(pa.table({"a": [1]}), bad)
    refused(f"its metadata has no {METADATA_KEY}")

    table = pq.read_table(good)
    text = table.schema.metadata[METADATA_KEY.encode()].decode()
    newer = text.replace('"format_version": 1', '"format_version": 2')
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: newer}), bad)
    refused("format version 2, this program reads 1")
    pq.write_table(table.drop_columns(["reward"]), bad)
    refused("its columns are")
    pq.write_table(table.slice(1), bad)
    refused("its sequences are not numbered from 0 on")
    place = table.column_names.index("log_probs")
    positive = pa.array([[1.0] * len(row) for row in table["log_probs"].to_pylist()])
    positive = positive.cast(pa.list_(pa.float32()))
    pq.write_table(table.set_column(place, "log_probs", positive), bad)
    refused("no log-probs")


def test_a_flipped_bit_never_changes_a_value(tmp_path: Path) -> None:
    """It is refused, or it hit a byte that nobody reads."""
    record = make_record(3)
    content = RecordWriter(tmp_path / "good").write(record).read_bytes()
    bad = tmp_path / "train-000001-engine0.parquet"
    refused = 0
    for place in range(4, len(content) // 2, 101):
        bad.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            assert_same(read_record(bad), record)
        except UserError:
            refused += 1
    assert refused > 20


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Writing beyond 1,000 bytes fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files_only")
def test_a_write_that_fails_leaves_nothing_and_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written .*records\.keep") as caught:
        RecordWriter(tmp_path).write(make_record())
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_files_only")
def test_a_write_that_fails_in_the_background_is_reported(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.write_later(make_record(number=1))
    with pytest.raises(UserError, match="train-000001"):
        writer.write_later(make_record(number=2))
    writer.write_later(make_record(number=3))
    with pytest.raises(UserError, match="train-000003"):
        writer.close()
