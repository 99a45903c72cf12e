# SPDX-License-Identifier: Apache-2.0
"""An instruction and its parser belong together."""

import re

import pytest

from megatron.rl.errors import UserError
from megatron.rl.rewards.answer_format import (
    AS_IS,
    FORMATS,
    asked_format,
    format_for_problems,
)

BARE = ["What is six times seven?", "What is 1 + 1?"]
DAPO_LINE = (
    "The last line of your response should be of the form Answer: $Answer (without quotes).\n\n"
    'There are $7$ boxes.\n\nRemember to put your answer on its own line after "Answer:".'
)
DAPO_BOX = DAPO_LINE.replace("Answer: $Answer", "Answer: \\boxed{$Answer}")
QWEN_BOX = "What is 1 + 1? Please put your final answer within \\boxed{}."


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_response_that_follows_the_instruction_is_read(form) -> None:
    assert form.parse(form.example) == "42"
    assert form.parse(f"<think>{form.example.replace('42', '41')}</think>{form.example}") == "42"
    assert form.parse(f"<think>{form.example}") is None
    asked = form.ask("What is six times seven?")
    assert asked.startswith("What is six times seven?\n\n") and asked.endswith(form.instruction)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_the_form_that_the_instruction_names_is_the_one_that_is_read(form) -> None:
    # What is written as the instruction shows it, with a value in the place that it leaves open.
    shown = {"boxed": r"\\boxed\{\}", "answer_line": r"Answer: VALUE"}[form.name]
    (found,) = re.findall(shown, form.instruction)
    assert form.parse(found.replace("{}", "{42}").replace("VALUE", "42")) == "42"
    # And the instruction is recognised as asking for just that form.
    asked = asked_format(form.ask("1 + 1?"))
    assert asked is not None and asked.read is form.read


@pytest.mark.parametrize("problem", [DAPO_LINE, DAPO_BOX, QWEN_BOX])
def test_problems_that_ask_for_themselves_are_read_as_they_ask(problem: str) -> None:
    form = format_for_problems(AS_IS, [problem, problem])
    assert form.ask(problem) == problem
    assert form.parse(form.example) == "42"
    boxed, line = form.parse("\\boxed{42}"), form.parse("Answer: 42")
    assert boxed == (None if problem is DAPO_LINE else "42")
    assert line == (None if problem is QWEN_BOX else "42")


def test_a_problem_is_never_asked_in_two_forms() -> None:
    assert format_for_problems("boxed", BARE) is FORMATS["boxed"]
    for name in FORMATS:
        with pytest.raises(UserError, match="as_is"):
            format_for_problems(name, [DAPO_LINE, *BARE])
    with pytest.raises(UserError, match="found asked_box, none"):
        format_for_problems(AS_IS, [QWEN_BOX, *BARE])
    with pytest.raises(UserError, match="found asked_box, asked_line"):
        format_for_problems(AS_IS, [QWEN_BOX, DAPO_LINE])
    with pytest.raises(UserError, match="found none"):
        format_for_problems(AS_IS, BARE)
    with pytest.raises(UserError, match=r"expected boxed, answer_line or as_is.*'box'"):
        format_for_problems("box", BARE)
    # One in a hundred may happen to hold the word.
    assert format_for_problems("boxed", BARE * 50 + [DAPO_LINE]) is FORMATS["boxed"]
