# SPDX-License-Identifier: Apache-2.0
"""Which file a benchmark's name stands for, and which problems are asked."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.rl.errors import UserError
from megatron.rl.evaluation.benches import find_bench, find_benches, read_bench
from megatron.rl.rewards.registry import make_task

ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(30)]
DATA = Path(__file__).parents[2].parent / "shared" / "data"


def encode(text: str) -> list[int]:
    return list(text.encode())


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("bench", "file"),
    [
        ("aime24", "aime24.jsonl"),
        ("aime24", "AIME-2024.jsonl"),
        ("aime25", "aime_2025.jsonl"),
        ("gsm8k", "gsm8k_test.jsonl"),
        ("math500", "MATH-500.jsonl"),
        ("own_set", "own-set.jsonl"),
    ],
)
def test_known_file_names(tmp_path: Path, bench: str, file: str) -> None:
    path = write_lines(tmp_path / file, ROWS)
    write_lines(tmp_path / "gsm8k_train.jsonl", ROWS)
    found = find_bench(bench, tmp_path)
    assert (found.name, found.file) == (bench, path)


def test_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "aime24.jsonl", ROWS)
    monkeypatch.setenv("PDM_RL_DATA", str(tmp_path))
    assert find_bench("aime24", None).file == path
    monkeypatch.delenv("PDM_RL_DATA")
    with pytest.raises(UserError, match="--data DIR"):
        find_bench("aime24", None)


def test_named_path(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "anything.jsonl", ROWS)
    found = find_bench(f"mine={path}", None)
    assert (found.name, found.file) == ("mine", path)
    assert found.task.params["heldout"] == str(path)
    with pytest.raises(UserError, match="no such file"):
        find_bench("mine=nowhere.jsonl", None)
    with pytest.raises(UserError, match="NAME=PATH"):
        find_bench("=x", None)


def test_no_file_or_two(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="aime24 or aime2024"):
        find_bench("aime24", tmp_path)
    write_lines(tmp_path / "aime24.jsonl", ROWS)
    write_lines(tmp_path / "aime_2024.jsonl", ROWS)
    with pytest.raises(UserError, match="could be meant"):
        find_bench("aime24", tmp_path)


def test_name_given_twice(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(UserError, match="bench a is named twice"):
        find_benches([f"a={path}", f"a={path}"], None)


def test_a_file_with_every_problem_32_times(tmp_path: Path) -> None:
    """As DAPO's AIME-2024 is published, in which avg@16 would become avg@512."""
    path = tmp_path / "aime24.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS * 32), path)
    assert pq.read_metadata(path).num_rows == 960
    loaded = read_bench(find_bench("aime24", tmp_path), encode, None)
    assert [problem.gold for problem in loaded.problems] == [row["answer"] for row in ROWS]
    assert [problem.number for problem in loaded.problems] == list(range(30))
    assert loaded.has_answers


def test_first_problems_are_the_first_of_the_file(tmp_path: Path) -> None:
    bench = find_bench(f"b={write_lines(tmp_path / 'b.jsonl', ROWS)}", None)
    loaded = read_bench(bench, encode, 4)
    assert [problem.gold for problem in loaded.problems] == ["0", "2", "4", "6"]
    for problem, row in zip(loaded.problems, ROWS, strict=False):
        assert problem.prompt.text.startswith(row["problem"])
        assert bytes(problem.tokens).decode() == problem.prompt.text
    with pytest.raises(UserError, match="expected 31 different problems"):
        read_bench(bench, encode, 31)


def test_answer_format_is_the_one_asked_for(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "b.jsonl", ROWS)
    line = read_bench(find_bench(f"b={path}", None, "answer_line"), encode, 1).problems[0]
    box = read_bench(find_bench(f"b={path}", None), encode, 1).problems[0]
    assert "Answer:" in line.prompt.text and "boxed" not in line.prompt.text
    assert "boxed" in box.prompt.text


def test_generated_problems_need_a_number(tmp_path: Path) -> None:
    bench = find_bench("reasoning_gym/spell_backward", None)
    with pytest.raises(UserError, match="--problems"):
        read_bench(bench, encode, None)
    loaded = read_bench(bench, encode, 50)
    texts = [problem.prompt.text for problem in loaded.problems]
    assert len(set(texts)) == 50
    assert {problem.prompt.split for problem in loaded.problems} == {"heldout"}
    task = make_task(bench.task)
    assert all(task.reward(p.gold or "", p.prompt) == 1.0 for p in loaded.problems)


def test_a_generator_without_enough_problems() -> None:
    """A task with three different prompts, which it repeats."""
    bench = find_bench("tests.unit.test_eval_benches:ThreePrompts", None)
    assert len(read_bench(bench, encode, 3).problems) == 3
    with pytest.raises(UserError, match=r"expected 4 different problems .* found 3"):
        read_bench(bench, encode, 4)


class ThreePrompts:
    """Repeats itself for ever."""

    name = "three"

    def prompt(self, split: str, seed: int, index: int) -> object:
        from megatron.rl.rewards.task import Prompt

        return Prompt(f"question {index % 3}", "heldout", index, {})

    def reward(self, response_text: str, prompt: object) -> float:
        return 0.0


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the benchmark files beside the project")
def test_the_published_files() -> None:
    counts = {"aime24": 30, "aime25": 30, "math500": 500, "gsm8k": 1319}
    for name, count in counts.items():
        loaded = read_bench(find_bench(name, DATA), encode, None)
        assert len(loaded.problems) == count, name
