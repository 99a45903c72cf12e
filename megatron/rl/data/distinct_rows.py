# SPDX-License-Identifier: Apache-2.0
"""Rows of a table that have not been seen before, told apart by 128-bit digests.

A published file repeats each problem about a hundred times. Repeats inside a batch are found by
Arrow's own hash table, those across batches by a digest of the bytes in Arrow's buffers; only rows
that are new become Python objects. Memory is the batch and 16 bytes, with Python's overhead about
100, for each different row.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megatron.rl.data.problem_columns import ProblemColumns

DIGEST_BYTES = 16
# Stands for a null; no text has so many bytes.
_NULL_LENGTH = (1 << 64) - 1


@dataclass(frozen=True)
class RawProblem:
    """One different row as it stands in the file; None where its columns are null."""

    text: str | None
    answer: str | None
    source: str | None


class DistinctRows:
    """Passes on each different pair of text and answer once, with the first row's source.

    Attributes:
        rows: rows seen so far.
        repeats: those of them that were not passed on.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.repeats = 0
        self._seen: set[bytes] = set()

    def new_rows(self, columns: ProblemColumns) -> Iterator[RawProblem]:
        """Yield the rows of a batch that are new, in their order."""
        texts, answers = (column.dictionary_encode() for column in (columns.text, columns.answer))
        text_bytes, answer_bytes = _Bytes(texts.dictionary), _Bytes(answers.dictionary)
        places = _first_places(_codes(texts), _codes(answers))
        passed = 0
        for place in places.tolist():
            pair = hashlib.blake2b(digest_size=DIGEST_BYTES)
            for column, content in ((texts, text_bytes), (answers, answer_bytes)):
                code = column.indices[place].as_py()
                value = b"" if code is None else content[code]
                length = _NULL_LENGTH if code is None else len(value)
                pair.update(length.to_bytes(8, "little"))
                pair.update(value)
            digest = pair.digest()
            if digest in self._seen:
                continue
            self._seen.add(digest)
            passed += 1
            yield RawProblem(
                columns.text[place].as_py(),
                columns.answer[place].as_py(),
                columns.source[place].as_py(),
            )
        self.rows += len(columns)
        self.repeats += len(columns) - passed


def _codes(column: pa.DictionaryArray) -> npt.NDArray[np.int64]:
    """Return a column's codes [R]; 0 is null."""
    return column.indices.fill_null(-1).to_numpy().astype(np.int64) + 1


def _first_places(
    texts: npt.NDArray[np.int64], answers: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the places [N], rising, of the first row of each different pair of codes."""
    pairs = texts * (answers.max(initial=0) + 1) + answers
    return np.sort(np.unique(pairs, return_index=True)[1])


class _Bytes:
    """The bytes of each string of a large_string array, as views of its buffer."""

    def __init__(self, strings: pa.Array) -> None:
        _, offsets, data = strings.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)
        self._offsets = ends[strings.offset : strings.offset + len(strings) + 1].tolist()
        self._data = memoryview(b"" if data is None else data)

    def __getitem__(self, place: int) -> memoryview:
        return self._data[self._offsets[place] : self._offsets[place + 1]]
