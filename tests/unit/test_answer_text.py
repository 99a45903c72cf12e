# SPDX-License-Identifier: Apache-2.0
"""One spelling for what is written in many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.rewards.answer_text import normal_text
from tests.unit.traced_steps import steps_of


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("\\left( 3, \\dfrac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
        ("\\frac43", "\\frac{4}{3}"),
        ("\\frac 59", "\\frac{5}{9}"),
        ("\\frac9{19}", "\\frac{9}{19}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("11,\\! 111", "11,111"),
        ("10\\,080", "10 080"),
        ("90^{\\circ}", "90^\\circ"),
        ("\\mbox{ inches}^2", "\\text{inches}^2"),
        ("\uff11\uff12\u22123", "12-3"),
        ("\u0663\u0664", "34"),
        ("x\u00b2", "x^{2}"),
        ("\u03c0 r", "\\pi r"),
        ("**(x+1)**.", "x+1"),
        ("(1, 2)", "(1,2)"),
        ("1 2", "1 2"),
        ("\\text{Evelyn Smith}", "\\text{Evelyn Smith}"),
        ("x \\le 3\\\\ y", "x\\le 3\\\\y"),
        ("", ""),
        ("$", ""),
    ],
)
def test_normal_text(text: str, normal: str) -> None:
    assert normal_text(text) == normal


@given(st.text(max_size=50))
def test_the_normal_text_of_any_text_has_no_loose_space(text: str) -> None:
    normal = normal_text(text)
    assert normal == normal.strip() and "  " not in normal
    assert "$" not in normal


@pytest.mark.parametrize("unit", ["(", ")", "{", "**", "\\frac", "\\sqrt", "\\text{", "\\!", " "])
def test_steps_grow_no_faster_than_the_text(unit: str) -> None:
    for text in (unit, unit + "5", f"{unit}5)"):
        few = steps_of(normal_text.__wrapped__, text * 200)
        many = steps_of(normal_text.__wrapped__, text * 800)
        assert many <= 5 * few


def test_brackets_around_brackets_are_looked_at_a_few_times_only() -> None:
    few, many = ("(" * depth + "5" + ")" * depth for depth in (200, 800))
    steps = [steps_of(normal_text.__wrapped__, text) for text in (few, many)]
    assert steps[1] <= 5 * steps[0]
