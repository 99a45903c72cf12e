# SPDX-License-Identifier: Apache-2.0
r"""Responses that a policy might find on its way to a reward: what breaks parsers and sympy."""

import random
from collections.abc import Callable, Iterator

# One gold answer of each kind, so that every path of the comparison meets every kind of answer.
GOLDS = (
    "5",
    "-1234567",
    "\\frac{3}{7}",
    "\\frac{\\sqrt{3}}{4}",
    "x^2+2x+1",
    "6 - 5i",
    "(1,2)",
    "1,-2",
    "\\{1\\pm\\sqrt{5},-2\\}",
    "y = 2x + 3",
    "x \\le 3",
    "\\text{east}",
    "52_8",
    "(-\\infty, 2) \\cup (3, \\infty)",
    "\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}",
)
_ATOMS = (
    *("0", "1", "5", "9", "123456789", "0.1", ".5", "1e9", "-", "+", "*", "/", "^", "_", "!", "="),
    *("(", ")", "[", "]", "{", "}", "\\{", "\\}", "|", ",", ";", ":", "&", "\\\\", "<", ">", "%"),
    *("x", "y", "n", "i", "e", "E", "I", "S", "N", "Q", "oo", "nan", "zoo", "lambda", "None"),
    *("\\frac", "\\sqrt", "\\sqrt[", "\\binom", "\\pi", "\\infty", "\\pm", "\\mp", "\\cup", "\\in"),
    *(
        "\\sin",
        "\\log_",
        "\\ln",
        "\\sum_{k=1}^{9}",
        "\\int_0^1",
        "\\lim_{x\\to0}",
        "\\prod",
        "\\det",
    ),
    *(
        "\\text{",
        "\\text{and}",
        "\\mathrm{",
        "\\left(",
        "\\right)",
        "\\le",
        "\\ge",
        "\\ne",
        "\\approx",
    ),
    *(
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\boxed{",
        "\\fbox",
        "$",
        "$$",
        "\\(",
        "\\]",
        "Answer:",
    ),
    *("</think>", "<think>", "\n", "\t", "\r", "\x00", " ", "'", '"', "`", "#", "~", "@"),
    *("\u2212", "\uff15", "\u0665", "\u221a", "\u00bd", "\u00b2", "\u03c0", "\u202e", "\u0301"),
    *("\U0001d7d7", "\U0001f4a5", "\ud800", "\ufeff", "__import__('os')", "factorial(", "10**10"),
)


def responses(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield `count` pairs of a gold answer and a response; the same ones for a seed."""
    draw = random.Random(seed)
    for number in range(count):
        answer = draw.choice(_KINDS)(draw)
        yield GOLDS[number % len(GOLDS)], draw.choice(_FRAMES)(answer)


def _tower(draw: random.Random) -> str:
    levels = draw.randint(2, 12)
    base = draw.choice(("10", "9", "2", "x", "e", "(1+x)", "\\pi"))
    if draw.random() < 0.3:
        return "(" * levels + base + f")^{{{draw.randint(9, 9999)}}}" * levels
    power = draw.choice(("^{", "**(", "^("))
    return power.join([base] * levels) + {"^{": "}", "**(": ")", "^(": ")"}[power] * (levels - 1)


def _factorial(draw: random.Random) -> str:
    number = draw.choice(("9", "99", "999", "9999", "10^9", "(10^{9})", "x", "(3!)"))
    return number + "!" * draw.randint(1, 6) + draw.choice(("", "/2", "-1", "^{9}"))


def _binomial(draw: random.Random) -> str:
    return f"\\binom{{{10 ** draw.randint(1, 12)}}}{{{10 ** draw.randint(1, 6)}}}"


def _nested(draw: random.Random) -> str:
    opened, closed = draw.choice(
        (("{", "}"), ("(", ")"), ("\\sqrt{", "}"), ("\\frac{1}{", "}"), ("[", "]"), ("\\{", "\\}"))
        + (("\\left(", "\\right)"), ("\\boxed{", "}"), ("\\text{", "}"), ("|", "|"), ("-", ""))
    )
    depth = draw.choice((5, 50, 500, 5000))
    return opened * depth + "5" + closed * max(depth - draw.choice((0, 0, 0, 1)), 0)


def _huge(draw: random.Random) -> str:
    unit = draw.choice(
        ("9", "1,", "x+", "\\frac", " ", "=", "(1,2),", "\\pm", "\u0665", "5 \\cdot ")
    )
    return unit * draw.choice((100, 1000, 1000, 10_000, 10_000, 100_000))


def _polynomial(draw: random.Random) -> str:
    terms = (f"{draw.randint(-9, 9)}x^{{{draw.randint(0, 99)}}}" for _ in range(draw.randint(1, 9)))
    power = draw.choice(("", "", "^{9}", "^{99}", "^{999}"))
    return f"({'+'.join(terms)}){power}"


def _functions(draw: random.Random) -> str:
    names = ("\\sin", "\\cos", "\\tan", "\\ln", "\\arctan", "\\exp", "\\Gamma", "\\zeta", "\\log_2")
    depth = draw.randint(1, 6)
    opened = "".join(f"{draw.choice(names)}(" for _ in range(depth))
    return opened + draw.choice(("x", "1", "10^{9}", "x^{x}", "10^{-99}")) + ")" * depth


def _soup(draw: random.Random) -> str:
    return "".join(draw.choices(_ATOMS, k=draw.randint(1, 40)))


def _unicode(draw: random.Random) -> str:
    return "".join(chr(draw.randrange(0x110000)) for _ in range(draw.randint(1, 40)))


def _damaged_gold(draw: random.Random) -> str:
    gold = list(draw.choice(GOLDS))
    for _ in range(draw.randint(0, 3)):
        place = draw.randrange(len(gold) + 1)
        gold[place : place + draw.randint(0, 1)] = draw.choice(_ATOMS)
    return "".join(gold)


_KINDS: tuple[Callable[[random.Random], str], ...] = (
    *(_tower, _factorial, _binomial, _nested, _huge, _polynomial, _functions),
    *(_soup, _soup, _unicode, _damaged_gold, _damaged_gold),
)
_FRAMES: tuple[Callable[[str], str], ...] = (
    lambda answer: f"So \\boxed{{{answer}}}.",
    lambda answer: f"So $\\boxed{{{answer}}}$",
    lambda answer: f"\\boxed{{{answer}}} \\boxed{{5}} \\boxed{{{answer}}}",
    lambda answer: f"<think>\\boxed{{5}}</think>\\boxed{{{answer}}}",
    lambda answer: f"\\boxed{{{answer}",
    lambda answer: f"**Answer:** {answer}",
    lambda answer: answer,
)
