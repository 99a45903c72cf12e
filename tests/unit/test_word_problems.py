# SPDX-License-Identifier: Apache-2.0
"""tools/make_word_problems.py: answers that are right, problems that differ, bytes that do not."""

import ast
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.rl.data.problem_files import read_problems
from tools.make_word_problems import TEMPLATES, Difficulty, main, word_problems

COUNT = 500
CALCULATION = re.compile(r"(\S+)=\$?<<([^<>=]+)=(\d+)>>(\d+)")


def make(out: Path, *arguments: str) -> list[dict[str, str]]:
    assert main(["--out", str(out), "--count", str(COUNT), *arguments]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def evaluate(expression: str) -> Fraction:
    """Read a calculation as Python does, and do it in exact fractions."""
    term = ast.parse(expression, mode="eval").body
    assert isinstance(term, ast.BinOp)
    left, right = (Fraction(ast.literal_eval(side)) for side in (term.left, term.right))
    match term.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
    raise AssertionError(f"not one of + - * /: {expression}")


def numbers_of(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def test_every_worked_line_is_right_and_uses_the_numbers_of_the_question(tmp_path: Path) -> None:
    for row in make(tmp_path / "words.jsonl"):
        *lines, last = row["answer"].split("\n")
        known = set(numbers_of(row["question"])) | ({"2"} if "Half" in row["question"] else set())
        used: set[str] = set()
        result = ""
        for line in lines:
            ((shown, expression, result, repeated),) = CALCULATION.findall(line)
            assert shown.removeprefix("$") == expression
            assert result == repeated
            assert evaluate(expression) == int(result), line
            assert set(numbers_of(expression)) <= known, "a number from nowhere"
            used |= set(numbers_of(expression))
            known.add(result)
        assert last == f"#### {result}"
        assert set(numbers_of(row["question"])) <= used, "a number of the question plays no part"


def test_no_problem_comes_twice_and_every_kind_comes(tmp_path: Path) -> None:
    rows = make(tmp_path / "words.jsonl")
    questions = {row["question"] for row in rows}
    assert len(rows) == len(questions) == COUNT
    kinds = {re.sub(r"\d+|[A-Z][a-z]+", "", question)[:40] for question in questions}
    assert len(kinds) >= len(TEMPLATES)
    assert not [question for question in questions if re.search(r"[{}]", question)]


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    make(first, "--seed", "7")
    make(again, "--seed", "7")
    make(other, "--seed", "8")
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_the_difficulty_bounds_steps_and_numbers(tmp_path: Path) -> None:
    rows = make(tmp_path / "easy.jsonl", "--steps", "1", "--largest", "12")
    assert {row["answer"].count("\n") for row in rows} == {1}
    assert max(int(n) for row in rows for n in numbers_of(" ".join(row.values()))) == 12
    assert {row["answer"].count("\n") for row in make(tmp_path / "both.jsonl")} == {1, 2}


def test_the_layout_is_read_as_that_of_gsm8k(tmp_path: Path) -> None:
    out = tmp_path / "words.jsonl"
    rows = make(out)
    problems = read_problems(out)
    assert [problem.text for problem in problems] == [row["question"] for row in rows]
    for problem, row in zip(problems, rows, strict=True):
        assert f"#### {problem.answer}" == row["answer"].rpartition("\n")[2]


def test_too_many_problems_end_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none.jsonl"
    assert main(["--out", str(out), "--count", "10", "--largest", "2"]) == 2
    assert "found 0 different problems only" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_problems_there_are_come_once() -> None:
    """With one step and numbers up to 6: rows of trees, 2 x 2, 2 x 3 and 3 x 2, in one wording."""
    questions = [row["question"] for row in word_problems(1, Difficulty(steps=1, largest=6))]
    assert len(questions) == len(set(questions))
    assert len([question for question in questions if "rows of trees" in question]) == 3
