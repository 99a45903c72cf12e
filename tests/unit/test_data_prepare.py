# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl data prepare``: what it drops, what it writes, and that it repeats itself."""

import hashlib
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron.rl.cli import main
from megatron.rl.data import distinct_rows, table_files
from megatron.rl.data.distinct_rows import DistinctRows
from megatron.rl.data.heldout_index import HeldoutIndex
from megatron.rl.data.problem_columns import ProblemColumns
from megatron.rl.data.problem_files import Problem, read_problems
from megatron.rl.data.problem_filter import FilterRules, ProblemFilter
from megatron.rl.data.problem_text import has_cjk, integer_answer, normal_text, words
from megatron.rl.rewards.answer_format import FORMATS
from tests.duplicated_problems import Published, write_published


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(*arguments):
    return main(["data", "prepare", *map(str, arguments)])


def card_of(folder):
    return json.loads((folder / "card.json").read_text())


def test_a_published_file_gives_each_good_problem_once(tmp_path, monkeypatch, capsys):
    # Batches and row groups that cut through copies.
    monkeypatch.setattr(table_files, "BATCH_ROWS", 700)
    content = Published(good=150, conflicting=6, unanswered=4, fractions=10)
    source, out = tmp_path / "dapo.parquet", tmp_path / "out"
    rows = write_published(source, content, copies=30, seed=3)
    assert rows == 170 * 30
    assert prepare(source, "--out", out, "--answers", "integer") == 0
    counts = card_of(out)["counts"]
    # Different rows: one of each problem, two of the conflicting ones.
    different = 170 + 6
    assert counts == {
        "rows": rows,
        "kept": 150,
        "dropped": {
            "no_answer": 4,
            "repeat": rows - different,
            "conflict": 12,
            "not_integer": 10,
        },
    }
    assert counts["rows"] == counts["kept"] + sum(counts["dropped"].values())
    table = pq.read_table(out / "train.parquet")
    assert table.column_names == ["text", "answer", "source", "id"]
    assert all(field.type == pa.string() for field in table.schema)
    good = {f"Problem {i}": str(i * 7 - 1000) for i in range(150)}
    problems = table.to_pylist()
    assert {p["text"].partition(":")[0]: p["answer"] for p in problems} == good
    assert len(problems) == 150 and len({p["id"] for p in problems}) == 150
    assert {p["source"] for p in problems} == {"math_dapo"}
    shown = capsys.readouterr().out
    assert "5,100  rows read" in shown and "150  problems kept" in shown
    names = ("text", "answer", "source")
    assert read_problems(out) == [Problem(*(p[name] for name in names)) for p in problems]


def test_the_same_settings_write_the_same_bytes(tmp_path, capsys):
    source = tmp_path / "dapo.parquet"
    write_published(source, Published(good=40), copies=3, seed=1)

    def files(name, *more):
        assert prepare(source, "--out", tmp_path / name, "--name", "set", *more) == 0
        return {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}

    first = files("a", "--seed", "4")
    assert files("b", "--seed", "4") == first == files("a", "--seed", "4", "--force")
    assert set(first) == {"train.parquet", "card.json", "README.md"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "dapo.parquet"]
    other = files("c", "--seed", "5")
    assert other["train.parquet"] != first["train.parquet"]
    orders = [read_problems(tmp_path / name / "train.parquet") for name in "ac"]
    assert orders[0] != orders[1] and set(orders[0]) == set(orders[1])
    card = card_of(tmp_path / "a")
    assert card["inputs"][0]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert card["output"]["sha256"] == hashlib.sha256(first["train.parquet"]).hexdigest()
    assert str(tmp_path) not in json.dumps(card)


def test_every_reason_is_counted_once(tmp_path, byte_model, capsys):
    text = "{} sheep has a farmer, who buys as many as he has fingers on both hands; how many?"
    rows = [
        ("kept", "7"),
        (" kept\u00a0", "+07"),  # a repeat once spacing and spelling are set aside
        ("", "7"),
        ("   \u200b", "7"),
        ("unanswered", None),
        ("half", "1/2"),
        ("\u8bbe $x$", "7"),
        ("two answers", "7"),
        ("two answers", "8"),
        ("two  answers", "7"),
        ("Held OUT problem: $x+1$", "7"),
        ("held out problem: $x-1$", "7"),
        (text.format(13), "23"),
        ("long " * 40, "7"),
    ]
    source = write_lines(
        tmp_path / "rows.jsonl", [{"problem": text, "answer": answer} for text, answer in rows]
    )
    heldout = write_lines(
        tmp_path / "heldout.jsonl",
        [
            {"problem": "held out problem $x + 1$", "answer": "9"},
            {"problem": text.format(12), "answer": "22"},
        ],
    )
    arguments = [source, "--out", tmp_path / "out", "--answers", "integer", "--no-cjk"]
    arguments += ["--exclude", heldout, "--format", "boxed"]
    # "kept" and its instruction fit exactly; the byte tokenizer and the base template add one.
    longest = len(FORMATS["boxed"].ask("held out problem: $x-1$")) + 1
    assert prepare(*arguments, "--model", byte_model, "--max-prompt-tokens", longest) == 0
    counts = card_of(tmp_path / "out")["counts"]
    assert counts["dropped"] == {
        "no_text": 2,
        "no_answer": 1,
        "repeat": 1,
        "conflict": 3,
        "cjk": 1,
        "not_integer": 1,
        "heldout_same": 1,
        "heldout_overlap": 1,
        "too_long": 1,
    }
    kept = [p.text for p in read_problems(tmp_path / "out" / "train.parquet")]
    assert kept == ["kept", "held out problem: $x-1$"]
    assert counts["rows"] == len(rows) == len(kept) + sum(counts["dropped"].values())


def test_several_sources_are_one_set(tmp_path, capsys):
    one = write_lines(tmp_path / "one.jsonl", [{"question": "a", "answer": "so\n#### 5"}])
    two = write_lines(tmp_path / "two.jsonl", [{"problem": t, "answer": "5"} for t in "ab"])
    assert prepare(one, two, "--out", tmp_path / "out") == 0
    assert read_problems(tmp_path / "out" / "train.parquet") == [
        Problem("a", "5", "one"),
        Problem("b", "5", "two"),
    ]
    layouts = [entry["layout"] for entry in card_of(tmp_path / "out")["inputs"]]
    assert layouts == ["question_answer", "problem_answer"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-prompt-tokens", "9"], "belong together"),
        (["--template", "base"], "--template has no effect without --model"),
        (["--columns", "text=problem"], "expected text=COLUMN"),
        (["--format", "boxed"], "--format has no effect without --model"),
        (["--answers", "integer"], "no problem is left of 1 rows: 1 answer is no integer"),
    ],
)
def test_mistakes_leave_nothing_behind(tmp_path, capsys, more, message):
    source = write_lines(tmp_path / "rows.jsonl", [{"problem": "p", "answer": "x"}])
    assert prepare(source, "--out", tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_in_the_way_is_kept(tmp_path, capsys):
    source = write_lines(tmp_path / "rows.jsonl", [{"problem": "p", "answer": "5"}])
    out = tmp_path / "out"
    assert prepare(source, "--out", out) == 0
    before = card_of(out)
    assert prepare(source, "--out", out, "--name", "other") == 2
    assert "--force" in capsys.readouterr().err and card_of(out) == before
    assert prepare(source, "--out", out, "--name", "other", "--force") == 0
    (out / "notes.txt").write_text("mine")
    assert prepare(source, "--out", out, "--force") == 2
    assert "other files (notes.txt)" in capsys.readouterr().err
    assert (out / "notes.txt").read_text() == "mine" and card_of(out)["name"] == "other"


CELLS = st.one_of(st.none(), st.text("ab\0\u00e9", max_size=3))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(CELLS, CELLS), max_size=40), st.integers(1, 7), st.integers(0, 3))
def test_distinct_rows_are_those_of_a_set(pairs, batch, offset):
    distinct = DistinctRows()
    found = []
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        # Slices of longer arrays, as Arrow hands them out.
        padded = [("pad", "pad")] * offset + part
        text, answer = (pa.array(column, pa.large_string()) for column in zip(*padded, strict=True))
        columns = ProblemColumns(text[offset:], answer[offset:], text[offset:])
        found += [(row.text, row.answer) for row in distinct.new_rows(columns)]
    assert found == list(dict.fromkeys(pairs))
    assert (distinct.rows, distinct.repeats) == (len(pairs), len(pairs) - len(found))


def test_only_new_rows_become_objects(monkeypatch):
    made = Counter()

    def counted(*cells):
        made["rows"] += 1
        return cells

    monkeypatch.setattr(distinct_rows, "RawProblem", counted)
    texts = pa.array([f"problem {i % 10}" for i in range(10_000)], pa.large_string())
    list(DistinctRows().new_rows(ProblemColumns(texts, texts, texts)))
    assert made["rows"] == 10


def test_a_conflict_takes_all_its_rows_whatever_their_order():
    for answers in (["1", "1", "2"], ["2", "1", "1"], ["1", "2", "1"]):
        rows = ProblemFilter(FilterRules())
        for answer in answers:
            rows.add(Problem("p", answer, ""))
        assert rows.kept(lambda *_: None) == {}
        # The repeat of the first answer is a repeat only while nobody contradicts it.
        assert sum(rows.dropped.values()) == 3 and rows.dropped["conflict"] >= 2


def test_integer_answers():
    read = {
        "5": "5",
        "-34": "-34",
        "\u221234": "-34",
        " +007 ": "7",
        "$1,234,567$": "1234567",
        "-0": "0",
        "0": "0",
        "9" * 40: "9" * 40,
    }
    assert {raw: integer_answer(raw) for raw in read} == read
    for other in ("", "$", "$$", "5.0", "1e3", "1,23", "1/2", "x", "5%", "--5", "\u0665", "\u00b2"):
        assert integer_answer(other) is None, other


def test_texts_that_look_alike_are_the_same_and_no_others():
    assert normal_text("a\u0301\n b\u00a0\u200b") == normal_text("\u00e1 b")
    # Composed further (NFKC), a square would become the digit 2.
    assert normal_text("x\u00b2") != normal_text("x2")
    assert normal_text("x+1") != normal_text("x-1")
    assert words("If $x+1$, {Find} it!") == ("if", "x", "+", "1", "find", "it", "!")
    assert has_cjk("a \u8bbe b") and has_cjk("\u304b") and has_cjk("\ud55c")
    assert not has_cjk("na\u00efve \u2265 \u03c0 \u0436 \u2016")


def test_heldout_problems_are_found_whole_and_by_half_of_their_words():
    number = [f"w{i}" for i in range(40)]
    index = HeldoutIndex([" ".join(number), "short one"])
    assert index.match("SHORT, one") == "same" and index.match("short one more") is None
    # 28 n-grams of 13 words; 26 common words in a row have 14 of them, exactly half.
    other = [f"o{i}" for i in range(14)]
    assert index.match(" ".join(number[:26] + other)) == "overlap"
    assert index.match(" ".join(number[:25] + other)) is None


@pytest.fixture
def byte_model(tmp_path):
    """A folder with a tokenizer of one token a byte and no chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokens = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder
