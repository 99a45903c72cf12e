# SPDX-License-Identifier: Apache-2.0
"""Problem files: every published layout, the formats, and what is refused."""

import json
import string
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.data.problem_files import Problem, read_problems
from megatron.rl.data.problem_layouts import (
    INSTRUCTION_PREFIXES,
    INSTRUCTION_SUFFIXES,
    plain_answer,
    strip_instructions,
)
from megatron.rl.errors import UserError

PUBLIC_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


def chat(content, **more):
    return [{"role": "user", "content": content, **more}]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


LAYOUT_ROWS = {
    "dapo": (
        {
            "data_source": "math_dapo",
            "prompt": chat(DAPO_PREFIX + "Find $x$." + DAPO_SUFFIX),
            "ability": "MATH",
            "reward_model": {"ground_truth": "-34", "style": "rule"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        Problem("Find $x$.", "-34", "math_dapo"),
    ),
    "dapo_deduplicated": (
        {"prompt": "Find $x$.", "solution": "34", "reward_model": {"ground_truth": "34"}},
        Problem("Find $x$.", "34", "file"),
    ),
    "verl_gsm8k": (
        {
            "data_source": "openai/gsm8k",
            "prompt": chat(
                'Two and two? Let\'s think step by step and output the final answer after "####".'
            ),
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0, "split": "train"},
        },
        Problem("Two and two?", "4", "openai/gsm8k"),
    ),
    "dapo_lines": (
        {"prompt": chat("There are $7$ boxes."), "label": "34"},
        Problem("There are $7$ boxes.", "34", "file"),
    ),
    "deepscaler": (
        {"problem": "Find $x$.", "answer": "\\frac{3}{4}", "solution": "So \\boxed{9}."},
        Problem("Find $x$.", "\\frac{3}{4}", "file"),
    ),
    "gsm8k": (
        {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 1,234"},
        Problem("Two and two?", "1234", "file"),
    ),
    "gsm8k_prepared": (
        {"problem": "Two and two?", "answer": "4", "solution": "4\n#### 4"},
        Problem("Two and two?", "4", "file"),
    ),
    "math": (
        {
            "problem": "Find $x$.",
            "level": "Level 5",
            "type": "Algebra",
            "solution": "First \\boxed{1}, then $\\boxed{\\frac{1}{\\sqrt{2}}}$.",
        },
        Problem("Find $x$.", "\\frac{1}{\\sqrt{2}}", "file"),
    ),
    "math500": (
        {"problem": "Find $x$.", "answer": "p - q", "subject": "Algebra", "level": 2},
        Problem("Find $x$.", "p - q", "file"),
    ),
    "aime_capitals": (
        {"ID": "2024-I-1", "Problem": "Find $x$.", "Solution": "-", "Answer": 204},
        Problem("Find $x$.", "204", "file"),
    ),
    "prepared": (
        {"text": "Find $x$.", "answer": "7", "source": "math_dapo", "id": "0a"},
        Problem("Find $x$.", "7", "math_dapo"),
    ),
}


@pytest.mark.parametrize("layout", LAYOUT_ROWS)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_problems_of_every_published_layout(tmp_path, layout, suffix):
    row, problem = LAYOUT_ROWS[layout]
    path = tmp_path / f"file{suffix}"
    if suffix == ".parquet":
        write_parquet(path, [row])
    elif suffix == ".jsonl":
        write_lines(path, [row])
    else:
        path.write_text(json.dumps([row], indent=1))
    assert read_problems(path) == [problem]


def test_instructions_are_removed_whole_and_never_letter_by_letter():
    # A sentence as a set of letters (str.strip) eats the letters of a question that it holds.
    for prefix in INSTRUCTION_PREFIXES:
        for suffix in INSTRUCTION_SUFFIXES:
            for question in ("There are $7$ boxes", "Solve it: a one", 'the "Answer"'):
                assert strip_instructions(prefix + question + suffix) == question
    assert strip_instructions("The last line") == "The last line"


@given(st.text(string.ascii_letters + " $.:\n", min_size=1, max_size=80))
def test_a_question_survives_its_instructions(question):
    assert strip_instructions(DAPO_PREFIX + question + DAPO_SUFFIX) == question.strip()


def test_answers_of_gsm8k():
    assert plain_answer("so 5\n#### -1,234,567") == "-1234567"
    assert plain_answer("#### $18") == "18"
    assert plain_answer(" (1,2) ") == "(1,2)"
    assert plain_answer("work without an end ####") is None
    assert plain_answer("  ") is None


def test_numbers_keep_their_spelling(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(
        '{"problem": "a", "answer": 12345678901234567890123}\n{"problem": "b", "answer": 0.10}\n'
    )
    assert [p.answer for p in read_problems(path)] == ["12345678901234567890123", "0.10"]


def test_chats_count_their_one_user_message(tmp_path):
    system = {"role": "system", "content": "Be short."}
    rows = [
        {"prompt": [system, *chat("first")], "label": "1"},
        {"prompt": chat("second"), "label": "2"},
    ]
    for path in (
        write_lines(tmp_path / "a.jsonl", rows),
        write_parquet(tmp_path / "b.parquet", rows),
    ):
        assert [p.text for p in read_problems(path)] == ["first", "second"]
    several = [{"prompt": [*chat("one"), *chat("two")], "label": "3"}]
    with pytest.raises(UserError, match="no question"):
        read_problems(write_parquet(tmp_path / "c.parquet", [*rows, *several]))


def test_repeated_rows_count_once_and_keep_their_order(tmp_path):
    rows = [{"problem": f"problem {i % 30}", "answer": str(i % 30)} for i in range(30 * 32)]
    problems = read_problems(write_parquet(tmp_path / "aime.parquet", rows))
    assert [p.text for p in problems] == [f"problem {i}" for i in range(30)]


def test_one_question_with_two_answers_is_refused(tmp_path):
    rows = [{"problem": "p", "answer": "1"}, {"problem": "p ", "answer": "2"}]
    with pytest.raises(UserError, match=r"answers '1' and '2'.*pdm-rl data prepare"):
        read_problems(write_lines(tmp_path / "a.jsonl", rows))


def test_shards_of_a_folder_are_read_in_order(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for shard in (1, 0):
        rows = [{"problem": f"{shard}", "answer": "1"}]
        write_parquet(data / f"train-{shard:05d}-of-00002-0a1b2c.parquet", rows)
    (tmp_path / "README.md").write_text("card")
    assert [p.text for p in read_problems(tmp_path)] == ["0", "1"]
    write_parquet(data / "test-00000-of-00001.parquet", [{"problem": "t", "answer": "1"}])
    with pytest.raises(UserError, match=r"one split, found test, train"):
        read_problems(tmp_path)


def test_columns_may_be_named(tmp_path):
    rows = [{"q": DAPO_PREFIX + "Find $x$.", "meta": {"gold": "5"}, "where": "there"}]
    for path in (
        write_lines(tmp_path / "a.jsonl", rows),
        write_parquet(tmp_path / "b.parquet", rows),
    ):
        with pytest.raises(UserError, match=r"found q, meta, meta\.gold, where; known are verl"):
            read_problems(path)
        named = read_problems(path, layout="text=q, answer=meta.gold, source=where")
        assert named == [Problem("Find $x$.", "5", "there")]
        with pytest.raises(UserError, match="a column 'gold', found q, meta"):
            read_problems(path, layout="text=q,answer=gold")
    with pytest.raises(UserError, match="expected text=COLUMN"):
        read_problems(path, layout="question=q")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"problem": "p", "answer": "1"}\n{"problem": \n', "line 2 is no JSON"),
        ("a.jsonl", '["p", "1"]\n', "entry 1 is a str"),
        ("a.jsonl", '"p"\n', "entry 1 is a str"),
        ("a.json", "", "found none"),
        ("a.jsonl", '{"problem": "p", "answer": null}\n', "no answer"),
        ("a.jsonl", '{"problem": " ", "answer": "1"}\n', "no question"),
        ("a.jsonl", '{"problem": {"a": 1}, "answer": "1"}\n', "expected text"),
        ("a.jsonl", '{"problem": ["a"], "answer": "1"}\n', "lists of texts"),
        ("a.jsonl", '{"prompt": [{"text": "a"}], "label": "1"}\n', "with role and content"),
        ("a.jsonl", '{"problem": "\\ud800", "answer": "1"}\n', "half of a character"),
        (
            "a.jsonl",
            '{"problem": "p", "answer": "1"}\n{"problem": [], "answer": "1"}',
            "mixes types",
        ),
        ("a.parquet", "PAR1 not really", "not a Parquet file"),
        ("a.csv", "problem,answer\n", "ends in .parquet, .jsonl, .json"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_problems(tmp_path / name)


def test_the_hub_is_asked_only_by_its_prefix(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"found none; .*hf:ORG/NAME"):
        read_problems("BytedTsinghua-SIA/DAPO-Math-17k")
    with pytest.raises(UserError, match="expected hf:ORG/NAME"):
        read_problems("hf:dapo")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"huggingface_hub; install it, or download it"):
        read_problems("hf:BytedTsinghua-SIA/DAPO-Math-17k")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("aime24", 30),
        ("aime25", 30),
        ("gsm8k_test", 1319),
        ("math500", 500),
        ("dapo_math_sample12", 12),
    ],
)
def test_published_files_are_read_whole(name, count):
    path = PUBLIC_DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip("the published files are not on this machine")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    problems = read_problems(path)
    assert len(problems) == len(rows) == count
    for problem, row in zip(problems, rows, strict=True):
        assert problem.answer == (row.get("label") or str(row["answer"])).strip()
        shown = row["problem"] if "problem" in row else row["prompt"][0]["content"]
        assert problem.text in shown
        if name.startswith("dapo"):
            # What is left out is the published sentence before and the one behind, nothing else.
            paragraphs = shown.split("\n\n")
            assert problem.text == "\n\n".join(paragraphs[1:-1])
