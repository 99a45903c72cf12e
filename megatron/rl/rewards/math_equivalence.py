# SPDX-License-Identifier: Apache-2.0
r"""Whether an answer to a mathematical problem is the reference answer.

An answer goes down this list until a step decides, and the step is reported:

text       both have the same normal spelling (:mod:`.answer_text`)
number     both are written numbers: exact values (:mod:`.number_answers`)
base       the gold is a numeral in a stated base: the same digits, base given or left out
words      the gold is a word or a letter of choice: letters, without case and punctuation
structure  one has several parts: part by part (:mod:`.answer_structure`)
symbolic   everything else: math-verify (:mod:`.symbolic_answers`)

Decisions:

- Decimals are exact: 0.5 is 1/2, 0.333 is not 1/3, 3.14 is not pi. Forms are free: unreduced
  fractions and radicals, expanded and factored polynomials, mixed numbers.
- ``name = value`` answers a value, and a value ``name = value``; two different names differ. Of
  ``m+n = 256+37 = 293`` the last part counts, unless the gold is an equation itself. What stands
  behind ``\approx`` is a rounding: what stands before it counts.
- Units may be left out or added; two different known ones differ. 50\% equals 50 and 1/2.
- ``(1,2)`` is neither ``(2,1)`` nor ``[1,2]`` nor ``\{1,2\}``; ``1,2`` is ``2,1`` and ``\{2,1\}``,
  and stands for the tuple in its own order. ``1,234`` is a number, ``1, 234`` and ``(1,234)`` hold
  two. Repeated elements count. ``x > 3`` is ``(3,\infty)``.
- Upper and lower case letters are different variables; in words they are the same.
"""

import functools
import re
from dataclasses import dataclass
from typing import Literal

from megatron.rl.rewards.answer_extraction import top_level_split
from megatron.rl.rewards.answer_structure import parse_structure, same_structure, split_list
from megatron.rl.rewards.answer_text import normal_text
from megatron.rl.rewards.answer_units import without_unit
from megatron.rl.rewards.number_answers import (
    canonical_number,
    parse_base_numeral,
    parse_number,
    same_base_numeral,
    same_number,
)
from megatron.rl.rewards.symbolic_answers import same_value

Step = Literal["text", "number", "base", "words", "structure", "symbolic"]
# An answer so much longer than its gold is wrong, and is not looked at.
MAX_LENGTH, MAX_TIMES_LONGER = 4_000, 8
# Parts of parts of parts.
MAX_LEVELS = 4

_NAME = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+ ?|\\text ?\{[^{}]*\})(?:_(?:[0-9A-Za-z]|\{[^{}]*\}))?'*"
    r"(?:\([A-Za-z](?:,[A-Za-z])*\))?"
)
_INEQUALITY = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")
_TEXT_GROUP = re.compile(r"\\text ?\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
# What stands for words without \text around it: four letters at least, or one of these.
_SHORT_WORDS = frozenset(("yes", "no", "odd"))
_NOT_WORDS = frozenset(("sqrt", "frac", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"))


@dataclass(frozen=True)
class Verdict:
    """equal: whether the answer is right; step: which step of the list decided."""

    equal: bool
    step: Step


def compare(gold: str, answer: str) -> Verdict:
    """Compare an answer with the gold answer, in this order: the two are not interchangeable.

    Raises:
        TooCostlyError: the answer cannot be compared within bounds; it is wrong.
    """
    if len(answer) > max(MAX_LENGTH, MAX_TIMES_LONGER * len(gold)):
        return Verdict(False, "text")
    return _compare_again(gold, answer)


@functools.lru_cache(maxsize=1024)  # a group's responses often agree
def _compare_again(gold: str, answer: str) -> Verdict:
    return _compare(normal_text(gold), normal_text(answer), MAX_LEVELS)


def canonical_answer(answer: str) -> str:
    """Return one text for the common spellings of an answer, to count equal answers by.

    Numbers are reduced; units and the name of a value are left out. Equal answers may still have
    different texts, as ``(x+1)^2`` and ``x^2+2x+1`` do.
    """
    if len(answer) > MAX_LENGTH:  # no answer; it is not carried around whole
        return answer[:MAX_LENGTH]
    text = _exact_side(normal_text(answer))
    sides = _sides(text)
    if len(sides) > 2 or (len(sides) == 2 and _states_a_value(sides)):
        text = sides[-1]
    number = parse_number(text)
    if number is not None:
        return canonical_number(number)
    words = _words(text) if _is_words(text) else None
    return words or text


def _compare(gold: str, answer: str, levels: int) -> Verdict:
    answer = _exact_side(answer)
    if gold == answer:
        return Verdict(bool(gold), "text")
    if not gold or not answer or not levels:
        return Verdict(False, "text")
    gold_number, answer_number = parse_number(gold), parse_number(answer)
    if gold_number and answer_number:
        return Verdict(same_number(gold_number, answer_number), "number")
    base, answer_base = parse_base_numeral(gold), parse_base_numeral(answer)
    if base:
        return Verdict(same_base_numeral(base, answer_base or answer), "base")
    if answer_base and gold_number:
        return Verdict(False, "base")
    if _is_words(gold):
        return Verdict(_words(gold) == _words(answer), "words")
    if _is_words(answer):
        return Verdict(False, "words")
    gold_side, answer_side = map(without_unit, _comparable_sides(gold, answer))
    if (gold_side, answer_side) != (gold, answer):
        return _compare(gold_side, answer_side, levels - 1)
    return _compare_parts(gold, answer, levels)


def _compare_parts(gold: str, answer: str, levels: int) -> Verdict:
    gold_parts, answer_parts = parse_structure(gold), parse_structure(answer)
    if gold_parts and answer_parts:

        def same(one: str, other: str) -> bool:
            return _compare(one, other, levels - 1).equal

        return Verdict(same_structure(gold_parts, answer_parts, same), "structure")
    if gold_parts or answer_parts:
        # An inequality may stand for its interval; nothing else of one part equals several.
        single = answer if gold_parts else gold
        if not _INEQUALITY.search(single):
            return Verdict(False, "structure")
    return Verdict(same_value(gold, answer), "symbolic")


def _comparable_sides(gold: str, answer: str) -> tuple[str, str]:
    """Return the sides of equations to compare, or both as they are."""
    golds, answers = _sides(gold), _sides(answer)
    if len(golds) == 1:
        return gold, answers[-1]
    if not _NAME.fullmatch(golds[0]):
        return gold, answer
    if len(answers) == 1:
        return golds[-1], answer
    return (golds[-1], answers[-1]) if golds[0] == answers[0] else (gold, answer)


def _sides(text: str) -> list[str]:
    """Split ``a = b = c``; a list of equations, with commas between two ``=``, stays whole."""
    sides = [side.strip() for side in top_level_split(text, "=")]
    if len(sides) == 1 or not all(sides):
        return [text]
    if any(len(split_list(side)) > 1 for side in sides[:-1]):
        return [text]
    return sides


def _states_a_value(sides: list[str]) -> bool:
    if _NAME.fullmatch(sides[0]):
        return True
    number = parse_number(sides[1])
    return number is not None and number.value != 0


def _exact_side(text: str) -> str:
    r"""Return what stands before ``\approx``, or behind it where only a name stands before."""
    exact, approximately, rounded = text.partition(r"\approx")
    if not approximately or not exact.strip():
        return text
    return rounded.strip() if _NAME.fullmatch(exact.strip()) else exact.strip()


def _is_words(text: str) -> bool:
    bare = _TEXT_GROUP.sub(r"\1", text).strip(" ().")
    if not _WORDS.fullmatch(bare):
        return False
    if _TEXT_GROUP.fullmatch(text):
        return True
    words = bare.lower().split()
    return _NOT_WORDS.isdisjoint(words) and any(
        len(word) > 3 or word in _SHORT_WORDS for word in words
    )


def _words(text: str) -> str:
    bare = _TEXT_GROUP.sub(r"\1", text).replace("-", " ")
    return " ".join(bare.casefold().replace("(", " ").replace(")", " ").strip(" .").split())
