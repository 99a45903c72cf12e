# SPDX-License-Identifier: Apache-2.0
"""Where a response's answer is found: boxes, answer lines, thinking; in linear time."""

import pytest

from megatron.rl.rewards.answer_extraction import (
    after_thinking,
    end_of_chain,
    final_answer_line,
    final_box,
    top_level_split,
)
from tests.unit.traced_steps import steps_of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{34}.", "34"),
        (r"\fbox{34}", "34"),
        (r"\boxed {34}", "34"),
        (r"\\boxed{34}", "34"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\boxed{5}+1}", r"\boxed{5}+1"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a \\ b}", r"a \\ b"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        ("\\boxed{\n34\n}", "34"),
        (r"$\boxed 5$", "5"),
        (r"\boxed -5.", "-5"),
        (r"} } \boxed{5}", "5"),
        (r"{ { \boxed{5}", "5"),
        # No answer.
        ("no box", None),
        ("", None),
        (r"\boxed{", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{3} no, wait: \boxed{\frac{1", None),
        (r"\boxed{}", None),
        (r"\boxed{3} \boxed{ }", None),
        (r"put it in \boxed form", None),
        (r"\boxedx{5}", None),
        (r"boxed{5}", None),
    ],
)
def test_box(text: str, answer: str | None) -> None:
    assert final_box(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 73", "73"),
        ("answer: 73", "73"),
        ("ANSWER : 73.", "73"),
        ("**Answer:** 73", "73"),
        ("**Answer: 73**", "73"),
        ("**Answer**: **73**", "73"),
        ("### Final Answer: 73", "73"),
        ("The final answer: 73", "73"),
        ("- Answer: `73`", "73"),
        ("Answer: $13$", "13"),
        ("Answer: \\(13\\)", "13"),
        ("Answer: \\boxed{34}", "34"),
        ("Answer: $\\boxed{34}$.", "34"),
        ("Answer:\n\n34", "34"),
        ("Answer:\n\\[\n\\boxed{34}\n\\]", "34"),
        ("Answer:\n$$\n34\n$$", "34"),
        ("Answer: m+n = 256+37 = 293", "293"),
        ("Answer: $m+n = 256+37 = 293$.", "293"),
        ("Answer: y = 2x + 3", "y = 2x + 3"),
        ("Answer: x = 2, y = 3", "x = 2, y = 3"),
        ("Answer: 1\nso\nAnswer: 2\r\nDone.", "2"),
        ("Answer\uff1a 5", "5"),
        ("Answer: 3.5", "3.5"),
        # No answer.
        ("my answer is 5", None),
        ("Answer:", None),
        ("Answer: \\boxed{3", None),
        ("Unanswered: 5", None),
        ("", None),
    ],
)
def test_answer_line(text: str, answer: str | None) -> None:
    assert final_answer_line(text) == answer


def test_only_what_follows_the_thinking_counts() -> None:
    assert after_thinking("<think>\\boxed{1}</think>\\boxed{2}") == "\\boxed{2}"
    assert after_thinking("\\boxed{1}</think>nothing") == "nothing"
    assert after_thinking("<think>a</think>b</think>c") == "c"
    assert after_thinking("\\boxed{1}") == "\\boxed{1}"
    assert after_thinking("<think>\\boxed{1}") is None


def test_chains_and_splits() -> None:
    assert end_of_chain("a = b = c") == "c"
    assert end_of_chain("a = b") == "a = b"
    assert end_of_chain("f(a = b) = c") == "f(a = b) = c"
    assert end_of_chain("1 <= x <= 2") == "1 <= x <= 2"
    assert end_of_chain("x = y = 1, 2") == "x = y = 1, 2"
    assert top_level_split("(1,2),[3,4),{5,6}", ",") == ["(1,2)", "[3,4)", "{5,6}"]


UNITS = [
    "\\boxed{",
    "\\boxed",
    "\\boxed ",
    "\\boxed 5 ",
    "{",
    "}",
    "{}",
    "\\boxed{}",
    "\\boxed{5}",
    "\\",
    "Answer:",
    "Answer:\n",
    "Answer ",
    "the ",
    "** ",
    "=",
    "Answer: =",
    "(",
    "\n",
    " ",
    "<think>",
    "</think>",
]


@pytest.mark.parametrize("unit", UNITS)
def test_steps_grow_no_faster_than_the_text(unit: str) -> None:
    for read in (final_box, final_answer_line, after_thinking):
        text = "Answer: " + unit * 400
        few, many = steps_of(read, text), steps_of(read, "Answer: " + unit * 1600)
        assert many <= 4 * few + 50, read


@pytest.mark.parametrize("unit", UNITS)
def test_long_text(unit: str) -> None:
    # Patterns too: a quadratic one would be here for minutes to hours.
    text = unit * (300_000 // len(unit))
    for read in (final_box, final_answer_line, after_thinking):
        for start in ("", "Answer", "Answer: ", "the", "\\boxed"):
            read(start + text)
            read(start + text + " \\boxed{5}")


def test_boxes_of_large_responses() -> None:
    deep = "\\boxed{" + "{" * 100_000 + "5" + "}" * 100_000 + "}"
    assert final_box(deep) == deep[7:-1]
    assert final_box("x" * 10_000_000 + "\\boxed{5}") == "5"
    assert final_box("\\boxed{5}" + "x" * 10_000_000) == "5"
    assert final_answer_line("x\n" * 5_000_000 + "Answer: 5") == "5"
