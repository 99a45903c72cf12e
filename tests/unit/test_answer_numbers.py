# SPDX-License-Identifier: Apache-2.0
"""Written numbers are compared exactly, whatever their length and spelling."""

import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.rewards.answer_text import normal_text
from megatron.rl.rewards.math_equivalence import canonical_answer, compare
from megatron.rl.rewards.number_answers import (
    MAX_EXACT_DIGITS,
    canonical_number,
    parse_number,
)


def spellings(value: int) -> list[str]:
    plain = str(value)
    return [
        plain,
        f"{value:,}",
        f"{value:,}".replace(",", "{,}"),
        f"{value:,}".replace(",", ",\\!"),
        f"{value:,}".replace(",", "\\,"),
        plain.replace("-", "\u2212"),
        plain.translate({ord(str(d)): chr(0xFF10 + d) for d in range(10)}),
        f"${plain}$",
        f"\\({plain}\\)",
        f"**{plain}**",
        f"{plain}.",
        f"{plain}.0",
        f"{plain}\\text{{ dollars}}",
        f"{plain} dollars",
        f"\\text{{{plain}}}",
        ("-00" if value < 0 else "00") + plain.lstrip("-"),
        plain if value < 0 else f"+{plain}",
        f"x = {plain}",
        f"{plain}/1",
        f"\\frac{{{plain}}}{{1}}",
    ]


@given(st.integers(-(10**12), 10**12))
def test_every_spelling_of_an_integer_is_that_integer_and_no_neighbour(value: int) -> None:
    for spelling in spellings(value):
        assert compare(str(value), spelling).equal, spelling
        assert not compare(str(value + 1), spelling).equal, spelling
        assert value == 0 or not compare(str(-value), spelling).equal, spelling
        assert canonical_answer(spelling) == str(value), spelling


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_agree_with_exact_arithmetic(one: Fraction, other: Fraction) -> None:
    for value in (one, other):
        sign = "-" if value < 0 else ""
        top, bottom = abs(value.numerator), value.denominator
        whole, rest = divmod(top, bottom)
        for text in (
            f"{sign}\\frac{{{top}}}{{{bottom}}}",
            f"\\dfrac{{{sign}{3 * top}}}{{{3 * bottom}}}",
            f"{sign}{top}/{bottom}",
            f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}",
        ):
            parsed = parse_number(normal_text(text))
            assert parsed is not None and parsed.value == value, text
            assert compare(str(one), text).equal == (one == value)


@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-9999, max_value=9999)
)
def test_decimals_are_exact(value) -> None:
    exact = Fraction(value)
    assert compare(f"\\frac{{{exact.numerator}}}{{{exact.denominator}}}", f"{value:f}").equal
    assert not compare(f"{value:f}", f"{value:f}1").equal or f"{value:f}".find(".") < 0


def test_long_numerals_need_no_conversion() -> None:
    nines = "9" * 5000
    assert 5000 > sys.get_int_max_str_digits() > MAX_EXACT_DIGITS
    assert compare(nines, "0" * 5000 + nines).equal
    assert not compare(nines, nines[:-1] + "8").equal
    assert not compare(nines, "-" + nines).equal
    assert not compare("9", nines).equal
    assert compare(nines, nines + ".000").equal
    # Right at the length where digits take over from values.
    for digits in (MAX_EXACT_DIGITS, MAX_EXACT_DIGITS + 1):
        assert compare("7" * digits, "0" + "7" * digits + ".0").equal
        assert not compare("7" * digits, "7" * (digits - 1) + "8").equal
    for million in ("9" * 1_000_000, "1," + "000," * 300_000):
        assert not compare("5", million).equal


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("0.50", "1/2"),
        ("\\frac{2}{4}", "1/2"),
        ("50\\%", "50%"),
        ("m+n = 293", "293"),
        ("x^2 + y^2 = 0", "x^2+y^2=0"),
        ("\\text{(C)}", "c"),
        ("-0", "0"),
        ("2x + 1", "2x+1"),
        ("x = 2, y = 3", "x=2,y=3"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert canonical_answer(text) == canonical


@pytest.mark.parametrize("text", ["", "-", ".", "1/0", "\\frac{1}{0}", "1,23", "1.2.3", "5x", "e5"])
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) is None


def test_canonical_numbers_tell_values_apart() -> None:
    numbers = [parse_number(text) for text in ("1", "1.0", "2", "1/2", "1\\%", "9" * 500)]
    assert all(numbers)
    texts = [canonical_number(number) for number in numbers if number]
    assert texts[0] == texts[1] and len(set(texts)) == 5
