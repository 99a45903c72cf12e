# SPDX-License-Identifier: Apache-2.0
"""Texts, answers and sources of a table, as string columns; nothing is done row by row."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron.rl.data.problem_layouts import Layout
from megatron.rl.data.table_files import TableFile
from megatron.rl.errors import UserError


@dataclass(frozen=True)
class ProblemColumns:
    """The same R rows of three columns; each a large_string array, null where a row has none."""

    text: pa.Array
    answer: pa.Array
    source: pa.Array

    def __len__(self) -> int:
        return len(self.text)


def read_columns(table: TableFile, layout: Layout) -> Iterator[ProblemColumns]:
    """Yield the raw problem columns of a file, a batch of rows at a time.

    Raises:
        UserError: a column that the layout names is missing, or holds no text.
    """
    names = {column.casefold(): column for column in table.columns}
    text, answer = (_actual(names, column, table) for column in (layout.text, layout.answer))
    source = names.get(layout.source.casefold()) if layout.source is not None else None
    wanted = [column for column in (text, answer, source) if column is not None]
    needed = tuple(dict.fromkeys(column.partition(".")[0] for column in wanted))
    for batch in table.batches(needed):
        nothing = pa.nulls(batch.num_rows, pa.large_string())
        yield ProblemColumns(
            _strings(batch, text, table),
            _strings(batch, answer, table),
            nothing if source is None else _strings(batch, source, table),
        )


def _actual(names: dict[str, str], column: str, table: TableFile) -> str:
    try:
        return names[column.casefold()]
    except KeyError:
        raise UserError(
            f"{table.path}: expected a column {column!r}, found {', '.join(table.columns)}; name "
            "the columns with --columns text=COLUMN,answer=COLUMN"
        ) from None


def _strings(batch: pa.RecordBatch, column: str, table: TableFile) -> pa.Array:
    top, *members = column.split(".")
    values = batch.column(top)
    for member in members:
        if pa.types.is_null(values.type):
            break
        values = pc.struct_field(values, member)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = _user_messages(values, column, table)
    if pa.types.is_nested(values.type) or pa.types.is_binary(values.type):
        raise UserError(f"{table.path}: column {column} holds {values.type}, expected text")
    return values.cast(pa.large_string())


def _user_messages(chats: pa.Array, column: str, table: TableFile) -> pa.Array:
    """Return the content of each chat's user message; null where there is not exactly one."""
    kind = chats.type.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        raise UserError(f"{table.path}: column {column} holds lists of texts, expected one text")
    fields = [kind.field(i).name for i in range(kind.num_fields)]
    if not {"role", "content"} <= set(fields):
        raise UserError(
            f"{table.path}: column {column} holds {chats.type}, expected text or chat messages "
            "with role and content"
        )
    messages = chats.flatten()
    is_user = pc.equal(pc.struct_field(messages, "role"), "user").fill_null(False)
    user = np.flatnonzero(is_user.to_numpy(zero_copy_only=False))
    chat = pc.list_parent_indices(chats).to_numpy()[user]
    count = np.bincount(chat, minlength=len(chats))
    place = np.zeros(len(chats), dtype=np.int64)
    place[chat] = user
    chosen = pa.array(place, mask=count != 1)
    return pc.struct_field(messages, "content").take(chosen)
