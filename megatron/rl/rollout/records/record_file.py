# SPDX-License-Identifier: Apache-2.0
"""One record as a Parquet file. One row is one sequence of n response tokens, K entries each:

    sequence        int32          its number within the batch, over all engines
    prompt_id       int64          of its prompt; the sequences of a prompt are neighbours (a group)
    reward          float64
    advantage       float32        as trained on; 0 in held-out records
    finished        bool           ended by a stop token
    aborted         bool           the engine was told to stop before it ended
    prompt_tokens   list<int32>
    response_tokens list<int32>    n
    log_probs       list<float32>  n, of the response tokens under the behavior policy
    policy_versions list<int32>    n, of the weights that produced each token
    topk_ids        list<int32>    n x K, token after token, the largest first; -1 where absent
    topk_log_probs  list<float32>  n x K, exactly the values that were trained on; -inf where absent

What all rows share is JSON in the file's metadata, under ``pdm_rollouts``: ``format_version`` and
the fields of :class:`RecordInfo`.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megatron.rl.errors import UserError
from megatron.rl.rollout.protocol import SamplingSettings
from megatron.rl.rollout.records.record import Purpose, Record, RecordInfo, group_index
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns

METADATA_KEY = "pdm_rollouts"
FORMAT_VERSION = 1

SCHEMA = pa.schema(
    [
        ("sequence", pa.int32()),
        ("prompt_id", pa.int64()),
        ("reward", pa.float64()),
        ("advantage", pa.float32()),
        ("finished", pa.bool_()),
        ("aborted", pa.bool_()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("response_tokens", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("topk_ids", pa.list_(pa.int32())),
        ("topk_log_probs", pa.list_(pa.float32())),
    ]
)
# Byte streams before zstd: for 20 entries of a vocabulary of 151,936 it wrote 71 bytes a token
# where zstd alone wrote 95 and a dictionary with zstd 95. The other columns repeat their values.
SPLIT_COLUMNS = ("response_tokens", "log_probs", "topk_ids", "topk_log_probs")
# The lists of so many sequences are decoded at once.
ROWS_PER_GROUP = 64


def write_record(path: Path, record: Record) -> None:
    """Write a record, its rows in groups of :data:`ROWS_PER_GROUP`."""
    info = dataclasses.asdict(record.info) | {"format_version": FORMAT_VERSION}
    schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(info)})
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[
            name if pa.types.is_primitive(kind) else f"{name}.list.element"
            for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True)
            if name not in SPLIT_COLUMNS
        ],
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in SPLIT_COLUMNS},
        write_page_checksum=True,
    ) as writer:
        # Without sequences (nothing of the batch was trained on) there is one empty group of rows.
        for start in range(0, max(len(record), 1), ROWS_PER_GROUP):
            stop = min(start + ROWS_PER_GROUP, len(record))
            writer.write_table(_to_table(record, start, stop, schema))


def read_info(path: Path) -> RecordInfo:
    """Read what all rows of a file share.

    Raises:
        UserError: not a record, a damaged one, or one of another format version.
    """
    with _one_line_errors(path):
        text = (pq.read_schema(path).metadata or {}).get(METADATA_KEY.encode())
        if text is None:
            raise ValueError(f"its metadata has no {METADATA_KEY}")
        fields = json.loads(text)
        version = fields.pop("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, this program reads {FORMAT_VERSION}")
        settings = fields.pop("settings")
        settings["stop_token_ids"] = tuple(settings["stop_token_ids"])
        if fields["purpose"] not in get_args(Purpose):
            raise ValueError(f"purpose {fields['purpose']!r}")
        return RecordInfo(**fields, settings=SamplingSettings(**settings))


def count_rows(path: Path) -> int:
    """Return the number of sequences in a file."""
    with _one_line_errors(path):
        return int(pq.read_metadata(path).num_rows)


def read_record(path: Path) -> Record:
    """Read and check one file.

    Raises:
        UserError: not a record, or a damaged one.
    """
    info = read_info(path)
    with _one_line_errors(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        if not file.schema_arrow.equals(SCHEMA):
            raise ValueError(f"its columns are {file.schema_arrow.names}, expected {SCHEMA.names}")
        row = info.first_sequence
        parts = []
        for number in range(file.num_row_groups):
            parts.append(_from_table(info, file.read_row_group(number), row))
            row += len(parts[-1])
        if not parts:
            raise ValueError("it has no row group")
        record = Record.join(parts)
        if len(record) % info.samples_per_prompt:
            raise ValueError(f"{len(record)} sequences in groups of {info.samples_per_prompt}")
        record.rollouts.validate(info.vocab_size)
    return record


def read_prompt_ids(path: Path) -> NDArray[np.int64]:
    """Read the prompt id of every sequence of a file.

    Raises:
        UserError: not a record, or a damaged one.
    """
    with _one_line_errors(path):
        table = pq.read_table(path, columns=["prompt_id"])
        ids: NDArray[np.int64] = table["prompt_id"].combine_chunks().to_numpy()
        return ids


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn what a bad file makes pyarrow, json and our own checks raise into one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a readable rollout record: {reason}") from None


def _to_table(record: Record, start: int, stop: int, schema: pa.Schema) -> pa.Table:
    """Rows ``[start, stop)`` as a table."""
    rollouts, rows = record.rollouts, slice(start, stop)
    first, last = rollouts.response_offsets[start], rollouts.response_offsets[stop]
    ids, log_probs = rollouts.topk.decode(slice(first, last))
    prompts = record.prompt_offsets[start : stop + 1]
    responses = rollouts.response_offsets[start : stop + 1] - first

    def lists(values: NDArray[Any], offsets: NDArray[np.int64]) -> pa.Array:
        # 32 bits suffice: a group of rows has far below 2**31 entries.
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))

    columns = {
        "sequence": np.arange(start, stop, dtype=np.int32) + np.int32(record.info.first_sequence),
        "prompt_id": record.prompt_ids[rows],
        "reward": record.rewards[rows],
        "advantage": record.advantages[rows],
        "finished": rollouts.finished[rows],
        "aborted": rollouts.aborted[rows],
        "prompt_tokens": lists(
            record.prompt_tokens[prompts[0] : prompts[-1]], prompts - prompts[0]
        ),
        "response_tokens": lists(rollouts.response_tokens[first:last], responses),
        "log_probs": lists(rollouts.log_probs[first:last], responses),
        "policy_versions": lists(rollouts.policy_versions[first:last], responses),
        "topk_ids": lists(ids.reshape(-1), responses * rollouts.topk.k),
        "topk_log_probs": lists(log_probs.reshape(-1), responses * rollouts.topk.k),
    }
    return pa.table(columns, schema=schema)


def _from_table(info: RecordInfo, table: pa.Table, first_sequence: int) -> Record:
    """Undo :func:`_to_table` for the rows from sequence ``first_sequence`` on."""

    def values(name: str) -> NDArray[Any]:
        array: NDArray[Any] = table[name].combine_chunks().to_numpy(zero_copy_only=False)
        return array

    def lists(name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        column = table[name].combine_chunks()
        offsets = column.offsets.to_numpy().astype(np.int64)
        flat = column.values.to_numpy(zero_copy_only=False)
        return flat[offsets[0] : offsets[-1]], offsets - offsets[0]

    if (values("sequence") != np.arange(len(table)) + first_sequence).any():
        raise ValueError(f"its sequences are not numbered from {info.first_sequence} on")
    prompt_tokens, prompt_offsets = lists("prompt_tokens")
    response_tokens, response_offsets = lists("response_tokens")
    shape = (len(response_tokens), info.settings.top_logprobs)
    rollouts = Rollouts(
        prompt_index=group_index(len(table), info.samples_per_prompt),
        response_tokens=response_tokens,
        response_offsets=response_offsets,
        log_probs=lists("log_probs")[0],
        # What was decoded encodes to the same bytes again.
        topk=TopKColumns.encode(
            lists("topk_ids")[0].reshape(shape),
            lists("topk_log_probs")[0].reshape(shape),
            info.vocab_size,
            info.settings.topk_precision,
        ),
        policy_versions=lists("policy_versions")[0],
        finished=values("finished"),
        aborted=values("aborted"),
        generation_s=0.0,
    )
    return Record(
        info,
        prompt_tokens,
        prompt_offsets,
        values("prompt_id"),
        values("reward"),
        values("advantage"),
        rollouts,
    )
