# SPDX-License-Identifier: Apache-2.0
"""Problems with reference answers, from files as they are published."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.rl.data.distinct_rows import DistinctRows, RawProblem
from megatron.rl.data.problem_columns import read_columns
from megatron.rl.data.problem_layouts import Layout, detect_layout, find_layout
from megatron.rl.data.table_files import TableFile, table_files
from megatron.rl.errors import UserError


@dataclass(frozen=True)
class Problem:
    """A question and its reference answer.

    text    the bare question, without any instruction about the form of the answer
    answer  the reference answer as the file states it, without a box or ``####``
    source  where the file says it is from, or the file's name
    """

    text: str
    answer: str
    source: str


def read_problems(path: str | Path, layout: str | None = None) -> list[Problem]:
    """Return the problems of a file, of a folder of files, or of ``hf:ORG/NAME``, in their order.

    Rows that repeat a problem and its answer count once: a published file may hold each row 32 or
    100 times.

    Args:
        path: Parquet, JSON Lines or JSON.
        layout: the name of a known layout, or ``text=COLUMN,answer=COLUMN``; by default it is
            detected from the columns.

    Raises:
        UserError: nothing to read, an unknown layout, a row without question or answer, or one
            question with two answers; ``pdm-rl data prepare`` drops such rows.
    """
    problems: dict[str, Problem] = {}
    for table in table_files(path):
        columns = table_layout(table, layout)
        distinct = DistinctRows()
        for row in distinct_problems(table, columns, distinct):
            problem = as_problem(row, columns, table)
            if not problem.text or not problem.answer:
                lacks = "answer" if problem.text else "question"
                raise UserError(
                    f"{table.path}: a row has no {lacks} ({problem.text[:60]!r}); drop such rows "
                    "with pdm-rl data prepare"
                )
            known = problems.setdefault(problem.text, problem)
            if known.answer != problem.answer:
                raise UserError(
                    f"{table.path}: one question has the answers {known.answer!r} and "
                    f"{problem.answer!r} ({problem.text[:60]!r}); drop such rows with pdm-rl data "
                    "prepare"
                )
    if not problems:
        raise UserError(f"{path}: expected problems, found no row")
    return list(problems.values())


def table_layout(table: TableFile, layout: str | None) -> Layout:
    """Return the layout that the user named, or the one that the table has."""
    if layout is not None:
        return find_layout(layout)
    return detect_layout(table.columns, str(table.path))


def distinct_problems(
    table: TableFile, layout: Layout, distinct: DistinctRows
) -> Iterator[RawProblem]:
    """Yield the rows of a file that `distinct` has not seen."""
    for columns in read_columns(table, layout):
        yield from distinct.new_rows(columns)


def as_problem(row: RawProblem, layout: Layout, table: TableFile) -> Problem:
    """Return what a row says; text or answer is empty where the row has none."""
    answer = layout.clean_answer(row.answer) if row.answer is not None else None
    return Problem(
        layout.clean_text(row.text or ""),
        answer or "",
        row.source or table.path.stem,
    )
