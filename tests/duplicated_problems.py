# SPDX-License-Identifier: Apache-2.0
"""A Parquet file as DAPO-Math-17k is published: each problem is there about a hundred times."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron.rl.data.problem_layouts import INSTRUCTION_PREFIXES, INSTRUCTION_SUFFIXES

# Copies of all problems in one row group; reading must not need the whole group in memory.
COPIES_PER_ROW_GROUP = 10
VOCABULARY = (
    "let find the number of positive integer triangle circle radius point such that sum product "
    "angle prime divisor $x$ $n$ $\\frac{a}{b}$ $\\sqrt{c}$ sequence polynomial remainder when "
    "divided by relatively chord tangent probability fair coin card path grid square"
)


@dataclass(frozen=True)
class Published:
    """What the file holds, counted in different problems.

    good        with one integer answer
    conflicting with a second answer in half of their copies
    unanswered  with an empty answer
    fractions   whose answer is no integer
    """

    good: int
    conflicting: int = 0
    unanswered: int = 0
    fractions: int = 0

    @property
    def problems(self) -> int:
        return self.good + self.conflicting + self.unanswered + self.fractions


def write_published(path: Path, content: Published, copies: int, seed: int) -> int:
    """Write the file, some copies of all problems at a time, each in another order.

    Returns the number of rows, ``copies`` times that of the problems.
    """
    rng = np.random.default_rng(seed)
    texts = pa.array([_prompt(rng, number) for number in range(content.problems)])
    first, second = (pa.array(list(_answers(content, odd))) for odd in (False, True))
    with pq.ParquetWriter(path, _table(texts, first).schema, compression="snappy") as writer:
        for start in range(0, copies, COPIES_PER_ROW_GROUP):
            several = range(start, min(start + COPIES_PER_ROW_GROUP, copies))
            tables = [_table(texts, second if copy % 2 else first) for copy in several]
            order = np.concatenate([rng.permutation(content.problems) for _ in several])
            base = np.repeat(np.arange(len(tables)) * content.problems, content.problems)
            table = pa.concat_tables(tables).take(pa.array(order + base))
            writer.write_table(table, row_group_size=len(table))
    return copies * content.problems


def _prompt(rng: np.random.Generator, number: int) -> str:
    words = rng.choice(VOCABULARY.split(), size=int(rng.integers(30, 100)))
    question = f"Problem {number}: {' '.join(words)}?"
    return f"{INSTRUCTION_PREFIXES[0]}{question}{INSTRUCTION_SUFFIXES[0]}"


def _answers(content: Published, odd: bool) -> Iterator[str]:
    for number in range(content.good):
        yield str(number * 7 - 1000)
    for number in range(content.conflicting):
        yield str(number + odd)
    yield from [""] * content.unanswered
    yield from ["\\frac{1}{2}"] * content.fractions


def _table(texts: pa.Array, answers: pa.Array) -> pa.Table:
    count = len(texts)
    chats = pa.StructArray.from_arrays([texts, pa.array(["user"] * count)], ["content", "role"])
    offsets = pa.array(np.arange(count + 1, dtype=np.int32))
    styles = pa.array(["rule-lighteval/MATH_v2"] * count)
    return pa.table(
        {
            "data_source": pa.array(["math_dapo"] * count),
            "prompt": pa.ListArray.from_arrays(offsets, chats),
            "ability": pa.array(["MATH"] * count),
            "reward_model": pa.StructArray.from_arrays(
                [answers, styles], ["ground_truth", "style"]
            ),
            "extra_info": pa.StructArray.from_arrays(
                [pa.array([f"{i:032x}" for i in range(count)])], ["index"]
            ),
        }
    )
