# SPDX-License-Identifier: Apache-2.0
r"""What may follow a value and leave it as it is: ``\text{ cm}^2``, ``dollars``, ``^\circ``."""

import re
from dataclasses import dataclass

_SQUARE_OR_CUBE = r"(?:\^(?:[23]|\{[23]\}))?"
_UNIT = re.compile(
    r"(?:(?P<percent>\\%|\\text ?\{ ?(?:\\%|percent) ?\}| percent)"
    r"|(?P<degrees>\^\\circ(?: ?[CFK]|\\text ?\{ ?[CFK] ?\})?)"
    rf"|\\text ?\{{(?P<text>[A-Za-z .]*)\}}{_SQUARE_OR_CUBE}"
    rf"|(?<=[0-9]) (?P<words>[A-Za-z]{{3,}}(?: [A-Za-z]+){{0,3}}){_SQUARE_OR_CUBE}"
    rf"|(?<=[0-9]) ?(?P<symbol>mm|cm|km|kg|mL|ml|mg|lb|ft|mph){_SQUARE_OR_CUBE})$"
)
# Words that change or deny the number before them, or are mathematics themselves.
_NO_UNITS = frozenset(
    (
        *("hundred", "thousand", "million", "billion", "trillion", "dozen", "score", "half"),
        *("third", "quarter", "squared", "cubed", "factorial", "power", "base", "mod", "modulo"),
        *("choose", "plus", "minus", "times", "over", "per", "divided", "and", "or", "not", "to"),
        *("is", "are", "isn", "wrong", "pi", "sqrt", "sin", "cos", "tan", "log", "exp", "inf"),
    )
)
# A single letter in \text is a unit only if it is one: 5\text{x} is a product.
_ONE_LETTER_UNITS = frozenset("mgshlcfkjwvna")
# Names of one unit. Two different known units differ; a value without a unit has the other's.
_NAMES = {
    name: names[0]
    for names in (
        ("inch", "inches"),
        ("foot", "feet", "ft"),
        ("yard", "yards"),
        ("mile", "miles"),
        ("mm", "millimeter", "millimeters"),
        ("cm", "centimeter", "centimeters"),
        ("m", "meter", "meters", "metre", "metres"),
        ("km", "kilometer", "kilometers"),
        ("second", "seconds", "sec"),
        ("minute", "minutes", "min"),
        ("hour", "hours"),
        ("day", "days"),
        ("week", "weeks"),
        ("month", "months"),
        ("year", "years"),
        ("cent", "cents"),
        ("dollar", "dollars"),
        ("gram", "grams"),
        ("kg", "kilogram", "kilograms"),
        ("degree", "degrees"),
        ("radian", "radians"),
    )
    for name in names
}


@dataclass(frozen=True)
class Unit:
    """name: one name for a known unit, None for any other; percent: whether it is the sign."""

    name: str | None
    percent: bool = False


def parse_unit(text: str, start: int) -> Unit | None:
    """Return the unit that a normal text holds from `start` to its end; None where it is none."""
    match = _UNIT.match(text, start)
    if match is None:
        return None
    if match["percent"] or match["degrees"]:
        return Unit("degree" if match["degrees"] else None, match["percent"] is not None)
    words = (match["text"] or match["words"] or match["symbol"] or "").lower().split()
    if not _NO_UNITS.isdisjoint(words):
        return None
    if len(words) == 1 and len(words[0]) == 1 and words[0] not in _ONE_LETTER_UNITS:
        return None
    known = {_NAMES[word.strip(".")] for word in words if word.strip(".") in _NAMES}
    return Unit(known.pop() if len(known) == 1 else None)


def without_unit(text: str) -> str:
    r"""Take the unit off a value that is no written number, as in ``12\pi\text{ cm}^2``."""
    start = max(text.rfind("\\text"), text.rfind("^\\circ"), text.rfind("\\%"))
    return text[:start].strip() if start > 0 and parse_unit(text, start) else text
