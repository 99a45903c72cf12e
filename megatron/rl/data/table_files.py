# SPDX-License-Identifier: Apache-2.0
"""Tables in Parquet, JSON and JSON Lines files, read a batch at a time."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron.rl.data.hub_files import HUB_PREFIX, download_dataset
from megatron.rl.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".json")
# Rows that are in memory at once. Repeats are told apart batch by batch, so larger is faster.
BATCH_ROWS = 65_536
# Ends of file names that split one table into shards, and a hash of its content.
_SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$")


@dataclass(frozen=True)
class TableFile:
    """One file of problems.

    columns: its columns; members of a struct as ``struct.member`` beside it. rows: how many it
    has, where that is known without reading it.
    """

    path: Path
    columns: tuple[str, ...]
    rows: int | None = None

    def batches(self, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        """Yield the columns (top-level names), at most `BATCH_ROWS` rows a time.

        Raises:
            UserError: the file is damaged, or a column mixes types.
        """
        if self.path.suffix == ".parquet":
            return _parquet_batches(self.path, columns)
        return _json_batches(self.path, columns)


def table_files(source: str | Path) -> list[TableFile]:
    """Return the files of a source, in a fixed order.

    Args:
        source: a file, a folder of files of one split, or ``hf:ORG/NAME`` for a data set that is
            fetched from the Hugging Face hub.

    Raises:
        UserError: nothing there, a format that is not read, or a folder with several splits.
    """
    if str(source).startswith(HUB_PREFIX):
        path = download_dataset(str(source).removeprefix(HUB_PREFIX))
    else:
        path = Path(os.path.expanduser(source))
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        return [_open(file) for file in _files_of_folder(path)]
    if not os.path.isfile(path):
        hint = f"; a data set of the Hugging Face hub is written {HUB_PREFIX}ORG/NAME"
        raise UserError(f"{source}: expected a file or a folder of problems, found none{hint}")
    return [_open(path)]


def _files_of_folder(folder: Path) -> list[Path]:
    for place in (folder, folder / "data"):
        for suffix in SUFFIXES:
            files = sorted(place.glob(f"*{suffix}"))
            tables = {_SHARD.sub("", file.stem) for file in files}
            if len(tables) > 1:
                raise UserError(
                    f"{place}: expected the files of one split, found {', '.join(sorted(tables))}; "
                    "name the files themselves, or keep held-out ones elsewhere"
                )
            if files:
                return files
    raise UserError(f"{folder}: expected files that end in {', '.join(SUFFIXES)}, found none")


def _open(path: Path) -> TableFile:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        try:
            with pq.ParquetFile(path) as file:
                return TableFile(path, tuple(_dotted(file.schema_arrow)), file.metadata.num_rows)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # of a column's name
            raise UserError(f"{path}: not a Parquet file that can be read: {error}") from None
    first = next(_json_rows(path), {})
    columns: list[str] = []
    for name, value in first.items():
        columns.append(name)
        if isinstance(value, dict):
            columns += [f"{name}.{member}" for member in value]
    return TableFile(path, tuple(columns))


def _dotted(fields: Any, prefix: str = "") -> Iterator[str]:
    for field in fields:
        yield prefix + field.name
        if pa.types.is_struct(field.type):
            yield from _dotted(field.type, f"{prefix}{field.name}.")


def _parquet_batches(path: Path, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    # Read without buffering ahead: a row group of the published DAPO file fills memory.
    with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        try:
            for batch in file.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=True):
                batch.validate(full=True)  # texts that are no UTF-8, offsets that lead nowhere
                yield batch
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path}: cannot be read to its end: {error}") from None


def _json_batches(path: Path, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    for rows in itertools.batched(_json_rows(path), BATCH_ROWS):
        kept = [{name: row.get(name) for name in columns} for row in rows]
        try:
            yield pa.RecordBatch.from_pylist(kept)
        except pa.ArrowException as error:
            raise UserError(f"{path}: a column mixes types: {error}") from None
        except UnicodeEncodeError as error:
            raise UserError(f"{path}: a text holds half of a character: {error}") from None


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a file: one a line, or those of one list."""
    # A byte that is no UTF-8 becomes a visible mark instead of ending the file.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        opening = file.read(1)
        while opening.isspace():
            opening = file.read(1)
        file.seek(0)
        if opening == "[":
            numbered: Iterator[tuple[int, Any]] = enumerate(_parse(path, 1, file.read()), 1)
        else:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            numbered = ((number, _parse(path, number, line)) for number, line in lines)
        for number, row in numbered:
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}: entry {number} is a {type(row).__name__}, expected an object"
                )
            yield row


def _parse(path: Path, number: int, text: str) -> Any:
    # Numbers keep the spelling of the file: 1e3, 0.10 and 12345678901234567890 are answers.
    try:
        return json.loads(text, parse_int=str, parse_float=str)
    except ValueError as error:
        raise UserError(
            f"{path}: line {number} is no JSON ({error}); expected one object a line, or one list "
            "of objects"
        ) from None
