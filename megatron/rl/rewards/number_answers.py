# SPDX-License-Identifier: Apache-2.0
r"""Answers that are written numbers, compared exactly: 1,234 and 073, 5.0, .5, \frac{1}{2}, 1/2,
1\frac{4}{5}, 3 \times 10^{5}, 18 dollars, 50\%, 52_8.

No number is ever rounded: 0.333 is not 1/3. Nothing here costs more than linear time in the length
of a numeral: Python's own conversion is quadratic and refuses 4,300 digits, so that long numerals
are compared as digits.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from megatron.rl.rewards.answer_units import Unit, parse_unit

# Longer numerals are compared digit by digit; gcd and int() stay cheap below.
MAX_EXACT_DIGITS = 400
# 10^n is worked out up to here; a larger power of ten is left to the symbolic comparison.
MAX_POWER_OF_TEN = 400

# Digits, with commas or thin spaces before each group of three, or without.
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_SIGN = r"[-+]?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:"
    rf"(?:(?P<whole>[0-9]+) ?)?\\frac\{{(?P<top_sign>{_SIGN})(?P<top>{_DECIMAL})\}}"
    rf"\{{(?P<bottom>{_DECIMAL})\}}"
    rf"|(?:(?P<whole_plain>[0-9]+) )?(?P<top_plain>[0-9]+)/(?P<bottom_plain>[0-9]+)"
    rf"|(?P<decimal>{_DECIMAL})"
    rf"(?:(?:\\times|\\cdot|\*) ?10\^(?:\{{(?P<power>-?[0-9]{{1,3}})\}}|(?P<digit_power>[0-9]))"
    rf"|[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?"
    r")"
)
_BASE_NUMERAL = re.compile(r"([-+]?[0-9A-Z]+)_\{?(?:\\text\{)?([0-9]{1,2})\}*")


@dataclass(frozen=True)
class NumberAnswer:
    """A number as an answer states it.

    value    exact; the signed digits themselves where they are more than MAX_EXACT_DIGITS
    unit     the known unit that it is given in; None where there is none
    percent  whether a percent sign follows; `value` is then what stands before the sign
    """

    value: Fraction | str
    unit: str | None = None
    percent: bool = False


@dataclass(frozen=True)
class BaseNumeral:
    """Digits with the base that they are written in."""

    digits: str
    base: int


def parse_number(text: str) -> NumberAnswer | None:
    """Return the number that a normal text is; None where it is anything else."""
    match = _NUMBER.match(text)
    if match is None:
        return None
    unit = Unit(None) if match.end() == len(text) else parse_unit(text, match.end())
    value = _value(match)
    return None if unit is None or value is None else NumberAnswer(value, unit.name, unit.percent)


def parse_base_numeral(text: str) -> BaseNumeral | None:
    """Return digits with a base as in ``52_8`` or ``4210_{5}``; None for anything else."""
    match = _BASE_NUMERAL.fullmatch(text)
    if match is None or not any(letter.isdigit() for letter in match[1]):
        return None
    return BaseNumeral(match[1].removeprefix("+"), int(match[2]))


def same_number(gold: NumberAnswer, answer: NumberAnswer) -> bool:
    """Compare values exactly, after the sense of their units.

    A percent sign may be part of the question ("what percent ...") or of the number, so that 50%
    equals both 50 and 1/2; 50 and 1/2 stay different. Two different known units never agree.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.value == answer.value:
        return True
    if (
        gold.percent == answer.percent
        or isinstance(gold.value, str)
        or isinstance(answer.value, str)
    ):
        return False
    in_percent, plain = (gold, answer) if gold.percent else (answer, gold)
    return in_percent.value == plain.value * 100  # type: ignore[operator]


def same_base_numeral(gold: BaseNumeral, answer: BaseNumeral | str) -> bool:
    """Whether an answer has the gold's digits in its base; the question names it, so an answer may
    leave it out.
    """
    if isinstance(answer, BaseNumeral):
        return gold == answer
    return gold.digits == answer


def canonical_number(number: NumberAnswer) -> str:
    """Return one text for every spelling of a number; a percent sign stays."""
    return f"{number.value}%" if number.percent else str(number.value)


def _value(match: re.Match[str]) -> Fraction | str | None:
    negative = match["sign"] == "-"
    if match["decimal"] is not None:
        power = match["power"] or match["digit_power"] or match["exponent"] or "0"
        value = _decimal(match["decimal"], int(power))
    else:
        whole = match["whole"] or match["whole_plain"] or "0"
        top = _decimal(match["top"] or match["top_plain"])
        bottom = _decimal(match["bottom"] or match["bottom_plain"])
        first = _decimal(whole)
        if not (isinstance(top, Fraction) and isinstance(bottom, Fraction) and bottom):
            return None
        if not isinstance(first, Fraction) or (first and match["top_sign"]):
            return None
        value = first + (-top if match["top_sign"] == "-" else top) / bottom
    if value is None or not negative:
        return value
    return f"-{value}" if isinstance(value, str) else -value


def _decimal(numeral: str, power: int = 0) -> Fraction | str | None:
    """Return an unsigned decimal numeral times 10^power."""
    whole, _, part = numeral.replace(",", "").replace(" ", "").partition(".")
    whole, part = whole.lstrip("0"), part.rstrip("0")
    if len(whole) + len(part) > MAX_EXACT_DIGITS:
        return None if power else f"{whole or '0'}.{part}".removesuffix(".")
    if abs(power) > MAX_POWER_OF_TEN:
        return None
    return Fraction(int(whole + part or "0")) * Fraction(10) ** (power - len(part))
