# SPDX-License-Identifier: Apache-2.0
r"""Answers of several parts: lists, tuples and intervals, sets, unions, matrices.

Parts are taken apart here, so that only single values are ever compared symbolically: the order of
a tuple, the ends of an interval and the number of a set's elements are then decided by rules that
stand in this file.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.rl.rewards.answer_extraction import top_level_split
from megatron.rl.rewards.answer_text import closes_at

Kind = Literal["list", "brackets", "set", "union", "matrix"]
# Elements that are left after equal texts have been paired off; each pair may need a comparison.
MAX_UNORDERED = 12

_AND = re.compile(r",?(?:\\text ?\{ ?(?:and|or) ?\}| ?\b(?:and|or)\b) ?")
_MATRIX = re.compile(
    r"\\begin\{(?:[pb]?matrix|array)\}(?:\{[clr|]*\})?(?P<cells>.*?)\\end\{(?:[pb]?matrix|array)\}",
    re.DOTALL,
)
_MEMBER_OF = re.compile(r"[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\\in(?![A-Za-z]) ?")
_CUP = "\\cup"


@dataclass(frozen=True)
class Structure:
    """The parts of an answer, and how they belong together.

    list      ``1,-2``: the solutions of something; their order is free
    brackets  ``(1,2)``, ``[0,1)``: a point or an interval; order and brackets count
    set       ``\\{1,2\\}``: order is free
    union     ``(0,1)\\cup(2,3)``: order is free
    matrix    rows of cells; `shape` counts

    brackets  of kind "brackets": the opening and the closing one
    """

    kind: Kind
    parts: tuple[str, ...]
    brackets: str = ""
    shape: tuple[int, ...] = ()


def parse_structure(text: str) -> Structure | None:
    """Return the parts of a normal text; None where it is a single value."""
    text = _MEMBER_OF.sub("", text, count=1) if _MEMBER_OF.match(text) else text
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        return _matrix(matrix["cells"])
    united = text.split(_CUP)
    if len(united) > 1 and all(united):
        return Structure("union", tuple(part.strip() for part in united))
    if text.startswith(r"\{") and text.endswith(r"\}") and closes_at(text, 1) == len(text) - 1:
        return Structure("set", _expanded(_elements(text[2:-2])))
    if text[:1] in "([" and text[-1:] in ")]" and closes_at(text, 0) == len(text) - 1:
        parts = _elements(text[1:-1])
        if len(parts) > 1:
            return Structure("brackets", parts, text[0] + text[-1])
    parts = _expanded(split_list(text))
    return Structure("list", parts) if len(parts) > 1 else None


def same_structure(gold: Structure, answer: Structure, same: Callable[[str, str], bool]) -> bool:
    """Compare part by part with `same(gold part, answer part)`.

    A list may be answered as a set, and a set as a list. A list may be answered as a tuple, and a
    tuple as a list, in the gold's own order. Round brackets may not stand for square ones.
    """
    if len(gold.parts) != len(answer.parts) or gold.shape != answer.shape:
        return False
    kinds = {gold.kind, answer.kind}
    if kinds <= {"list", "set"} or kinds == {"union"}:
        return _same_unordered(gold.parts, answer.parts, same)
    if kinds == {"brackets"}:
        ordered = gold.brackets == answer.brackets
    else:
        ordered = kinds == {"matrix"} or (
            kinds == {"list", "brackets"} and "()" in (gold.brackets, answer.brackets)
        )
    return ordered and all(map(same, gold.parts, answer.parts))


def _same_unordered(
    gold: tuple[str, ...], answer: tuple[str, ...], same: Callable[[str, str], bool]
) -> bool:
    golds, answers = list(gold), []
    for part in answer:
        if part in golds:
            golds.remove(part)
        else:
            answers.append(part)
    if len(golds) > MAX_UNORDERED:
        return False
    for part in answers:
        # `same` is an equivalence: whichever equal gold is taken, the rest can be matched or not.
        match = next((place for place, one in enumerate(golds) if same(one, part)), None)
        if match is None:
            return False
        del golds[match]
    return True


def split_list(text: str) -> tuple[str, ...]:
    """Return the elements of ``1, 2 \\text{ and } 3``; a single value is its only element."""
    return _elements(_AND.sub(",", text))


def _elements(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in top_level_split(text, ",;"))
    return parts if all(parts) else (text,)


def _expanded(parts: tuple[str, ...]) -> tuple[str, ...]:
    r"""Write ``1 \pm 2`` as its two values."""
    expanded: list[str] = []
    for part in parts:
        if part.count(r"\pm") == 1:
            expanded += (_signed(part, "+", "-"), _signed(part, "-", "+"))
        else:
            expanded.append(part)
    return tuple(expanded)


def _signed(text: str, upper: str, lower: str) -> str:
    signed = re.sub(r"\\pm(?![A-Za-z]) ?", upper, text)
    return re.sub(r"\\mp(?![A-Za-z]) ?", lower, signed).removeprefix("+")


def _matrix(cells: str) -> Structure | None:
    rows = [row.split("&") for row in cells.strip().removesuffix("\\\\").split("\\\\")]
    widths = {len(row) for row in rows}
    if len(widths) != 1:
        return None
    parts = tuple(cell.strip() for row in rows for cell in row)
    return Structure("matrix", parts, shape=(len(rows), widths.pop()))
