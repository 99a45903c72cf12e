# SPDX-License-Identifier: Apache-2.0
"""The scoring rules of reasoning_gym's data sets, without what they give away and what they run.

Their rules were written to judge answers, not to be optimised against:

- Many give a little, 0.01 to 0.05, to any text, some to none at all; game_of_life_halting gives a
  full score to any text. Here a score counts only as far as an answer without content would not get
  it as well (the reference answer excepted).
- Some raise on a text that they cannot read. Here that is a wrong answer, as long as the rule works
  on the reference answer.
- Some evaluate the answer as Python: as a literal, or as an expression in SymPy, which evaluates it
  too. Here a text that would do more than that is a wrong answer and is not evaluated.

A rule may also change the entry that it is given; each call gets a copy.
"""

import ast
import copy
from collections.abc import Callable, Mapping
from typing import Any

# Data sets whose rule evaluates the answer: with eval, and with SymPy's parse_expr.
EVALUATED_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATED_EXPRESSIONS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
# No data set asks for either of these.
_NO_ANSWERS = ("", "¤")
_MOST_EVALUATED_CHARS = 10_000

_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub,
)  # fmt: skip
_FUNCTIONS = frozenset(
    {
        "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh",
        "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "Abs", "Rational", "Integer",
    }
)  # fmt: skip

Rule = Callable[[str, dict[str, Any]], Any]


def score_answer(data_set: str, rule: Rule, answer: str, entry: Mapping[str, Any]) -> Any:
    """Score an answer by a data set's rule.

    Args:
        data_set: its name.
        rule: its ``score_answer``.
        answer: without white space around it.
        entry: its own, with the reference answer, if there is a single one.

    Returns:
        What the rule says, or 0 as described above.

    Raises:
        Exception: the rule's, if it raises on the reference answer as well.
    """
    reference = None if entry["answer"] is None else str(entry["answer"])
    if reference is not None and answer == reference.strip():
        return _apply(rule, answer, entry)
    if not may_be_evaluated(data_set, answer):
        return 0.0
    try:
        score = _apply(rule, answer, entry)
    except Exception:
        _apply(rule, "" if reference is None else reference, entry)
        return 0.0
    if score == 0.0 or score <= max(_given_away(rule, text, entry) for text in _NO_ANSWERS):
        return 0.0
    return score


def may_be_evaluated(data_set: str, answer: str) -> bool:
    """Whether the rule of a data set can be given this text: it evaluates nothing but values."""
    if data_set in EVALUATED_LITERALS:
        return _is_literal_or_no_python(answer)
    if data_set in EVALUATED_EXPRESSIONS:
        return _is_arithmetic(answer)
    return True


def _apply(rule: Rule, answer: str, entry: Mapping[str, Any]) -> Any:
    return rule(answer, copy.deepcopy(dict(entry)))


def _given_away(rule: Rule, text: str, entry: Mapping[str, Any]) -> float:
    try:
        return float(_apply(rule, text, entry))
    except Exception:
        return 0.0


def _is_literal_or_no_python(text: str) -> bool:
    if len(text) > _MOST_EVALUATED_CHARS:
        return False
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return (
            True  # such as a board, line by line: evaluating it fails, and it is compared as text
        )
    except (RecursionError, MemoryError):
        return False
    try:
        ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _is_arithmetic(text: str) -> bool:
    if len(text) > _MOST_EVALUATED_CHARS:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # SymPy reads notations that Python does not, such as factorials. None is asked for.
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            return False
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float):
            return False
        if isinstance(node, ast.Name) and "_" in node.id:
            return False
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        ):
            return False
    return True
