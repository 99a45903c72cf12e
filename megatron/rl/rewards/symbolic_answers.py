# SPDX-License-Identifier: Apache-2.0
r"""Two single values compared by math-verify, behind checks that keep it honest and quick.

math-verify reads LaTeX into sympy and compares in several ways. Three of its habits are kept out:

- it stops itself with ``signal.alarm``, which fails outside of a main thread and does not stop
  sympy's C code: its limits are off, and the process that scores is killed instead;
- it is not symmetric: the gold answer always comes first, and both are wrapped in ``$...$``,
  without which a bare LaTeX answer is not read at all;
- it rounds decimals to six places and folds upper case, so that 0.333333 equals 1/3 and R equals r:
  both are compared at two points to 9 digits first, and their letters must agree in case.
"""

import functools
import logging
import re
from typing import Any

# What a final answer needs at most; sympy and the parser have no bounds of their own.
MAX_CHARS = 400
MAX_DEPTH = 20
MAX_NUMERAL_DIGITS = 30
MAX_EXPONENT_DIGITS = 4
# Of powers of brackets, multiplied, times the largest other: bounds the digits of nested powers.
MAX_TOTAL_EXPONENT = 10_000
MAX_FACTORIAL_DIGITS = 3
# Of a sum; larger ones have too many terms to be written out.
MAX_EXPANDED_POWER = 16
# Relative difference up to which two values are left to the symbolic comparison.
TOLERANCE = 1e-9
EVALUATION_DIGITS = 20

_UNFINISHED = re.compile(
    r"\\(?:sum|prod|[io]*int|lim|limsup|liminf|bigcup|bigcap|Gamma|zeta)(?![A-Za-z])"
)
_EXPONENT = re.compile(r"([)\]}]?) ?(?:\^|\*\*) ?(?:\{([^{}]*)\}|(.))")
_LONG_NUMERAL = re.compile(rf"[0-9]{{{MAX_NUMERAL_DIGITS + 1}}}")
_LARGE_BINOMIAL = re.compile(r"\\binom.*[0-9]{4}|\\binom.*\^|\^.*\\binom", re.DOTALL)
_FACTORIAL = re.compile(r"([0-9]*)[)}\]]?!")
_TOWER = re.compile(r"(?:\^|\*\*) ?\{?[^{}A-Za-z\\]*(?:\^|\*\*|!)")
_COMMAND = re.compile(r"\\text ?\{[^{}]*\}|\\[A-Za-z]+")


class TooCostlyError(ValueError):
    """An answer that would take sympy without bound; it counts as wrong."""


def same_value(gold: str, answer: str) -> bool:
    """Whether two normal texts are the same expression, equation or inequality.

    Raises:
        TooCostlyError: the answer holds towers, factorials, long numerals, deep nesting, or leaves
            sums and integrals to be worked out.
    """
    check_cost(answer)
    if not _letters_agree(gold, answer):
        return False
    gold_value, answer_value = _parse(gold), _parse(answer)
    if gold_value is None or answer_value is None:
        return False
    if _differ_somewhere(gold_value, answer_value):
        return False
    return _same_expanded(gold_value, answer_value) or _verify(gold_value, answer_value)


def check_cost(text: str) -> None:
    """Refuse what sympy would not come back from.

    These checks are cheap and catch the usual forms; the limit that holds is the worker's.

    Raises:
        TooCostlyError: with the reason.
    """
    if len(text) > MAX_CHARS:
        raise TooCostlyError(f"an answer of {len(text)} characters")
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise TooCostlyError(f"an answer nested {deepest} deep")
    if _LONG_NUMERAL.search(text):
        raise TooCostlyError(f"a numeral of more than {MAX_NUMERAL_DIGITS} digits in an expression")
    if _UNFINISHED.search(text):
        raise TooCostlyError("a sum, integral or special function that is left to be worked out")
    if _LARGE_BINOMIAL.search(text):
        raise TooCostlyError("a binomial coefficient of large numbers")
    if _TOWER.search(text):
        raise TooCostlyError("a tower of powers")
    innermost = outer = 1
    for bracket, braced, single in _EXPONENT.findall(text):
        numeral = (braced or single).strip(" -+")
        if numeral.isdigit():
            if len(numeral) > MAX_EXPONENT_DIGITS:
                raise TooCostlyError(f"an exponent of {len(numeral)} digits")
            if bracket:
                outer *= max(int(numeral), 1)
            else:
                innermost = max(innermost, int(numeral))
    if innermost * outer > MAX_TOTAL_EXPONENT:
        raise TooCostlyError("nested powers")
    for numeral in _FACTORIAL.findall(text):
        if len(numeral) > MAX_FACTORIAL_DIGITS or (not numeral and any(map(str.isdigit, text))):
            raise TooCostlyError("a factorial of a large number or of an expression")


def _letters_agree(gold: str, answer: str) -> bool:
    letters = [set(re.findall("[A-Za-z]", _COMMAND.sub("", text))) for text in (gold, answer)]
    for one, other in (letters, letters[::-1]):
        if any(letter.swapcase() in other for letter in one - other):
            return False
    return True


@functools.lru_cache(maxsize=4096)  # golds come again with every response of their group
def _parse(text: str) -> Any:
    """Return what math-verify reads in a normal text; None where it reads nothing."""
    library = _library()
    for thorough in (False, True):
        library.set_thorough(thorough)
        found = library.parse(
            f"${text}$",
            extraction_config=library.config,
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
        if found:
            return found[0]
    return None


def _same_expanded(gold: Any, answer: Any) -> bool:
    """Whether two expressions have the difference 0 once it is expanded: a quick proof, if any."""
    from sympy import Expr, Pow, expand

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    for power in gold.atoms(Pow) | answer.atoms(Pow):
        if power.base.is_Add and power.exp.is_Integer and abs(power.exp) > MAX_EXPANDED_POWER:
            return False
    try:
        return bool(expand(gold - answer) == 0)
    except MemoryError:
        raise
    except Exception:  # sympy raises what it likes where there is no difference
        return False


def _verify(gold: Any, answer: Any) -> bool:
    # An interval and the inequality that describes it are one answer, whichever the gold is.
    found = _library().verify([gold], [answer], timeout_seconds=None, allow_set_relation_comp=True)
    return bool(found)


def _differ_somewhere(gold: Any, answer: Any) -> bool:
    """Whether an answer is undefined, or has another value, at a point where the gold has one."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for shift in (0, 1):
        point = {symbol: (0.37 + 0.41 * shift + 0.173 * n) for n, symbol in enumerate(symbols)}
        first, second = _value_at(gold, point), _value_at(answer, point)
        if first is None:
            return False
        if second is None:  # undefined where the gold has a value
            return True
        if abs(first - second) > TOLERANCE * max(abs(first), abs(second)):
            return True
    return False


def _value_at(expression: Any, point: dict[Any, float]) -> complex | None:
    try:
        value = complex(expression.evalf(EVALUATION_DIGITS, subs=point))
    except MemoryError:
        raise
    except Exception:  # sympy raises what it likes where it has no number
        return None
    return value if abs(value) < float("inf") else None


class _Library:
    """math-verify, imported with the first answer that needs it: sympy takes a second.

    Most of its time goes into ANTLR's predictions of what comes next. Those that ignore the context
    (SLL) take less than half of it, and either give the parse tree of the others (LL) or a syntax
    error, after which a text is read again; see ``PredictionMode`` of the ANTLR 4 runtime. The mode
    is no parameter of math-verify: its parser is derived from here.
    """

    def __init__(self) -> None:
        import latex2sympy2_extended.latex2sympy2 as reader
        import math_verify
        from antlr4.atn.PredictionMode import PredictionMode
        from latex2sympy2_extended import NormalizationConfig

        class Parser(reader.PSParser):  # type: ignore[misc]
            prediction = PredictionMode.LL

            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self._interp.predictionMode = self.prediction

        reader.PSParser = Parser
        self._parser, self._modes = Parser, (PredictionMode.SLL, PredictionMode.LL)

        # It warns that its limits are off, which is what is wanted here.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.parse = math_verify.parse
        self.verify = math_verify.verify
        self.config = [
            math_verify.LatexExtractionConfig(
                boxed_match_priority=-1,
                # Units are taken off before: its own list holds "m", "h" and "c", also in 3m.
                normalization_config=NormalizationConfig(
                    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
                ),
            )
        ]

    def set_thorough(self, thorough: bool) -> None:
        """Choose how the next text is parsed: SLL or, thoroughly, LL."""
        self._parser.prediction = self._modes[thorough]


@functools.cache
def _library() -> _Library:
    return _Library()


# One of each: the grammar's tables and sympy's rules are built as they are first needed.
_FIRST_COMPARISONS = (
    ("x^2+2x+1", "(x+1)^2"),
    ("8n^{5}-4n-\\frac{1}{2}", "3ab(c-1)(d+2)"),
    ("\\frac{11+9a}{20}", "\\sqrt[3]{x}+|y|"),
    ("-\\frac{\\pi}{6}", "(-1/3)\\cdot 2"),
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("\\frac{\\cos x}{\\sin x}", "\\cot x"),
    ("6-5i", "6+5i"),
    ("y=2x+3", "2x-y+3=0"),
    ("x\\le3", "x<3"),
    ("-\\infty", "\\infty"),
    ("\\log_{2} x", "\\ln x"),
)


@functools.cache
def load() -> None:
    """Import math-verify and sympy and use them once.

    In the process that others are forked from: they then start warm, and need no file.
    """
    for gold, answer in _FIRST_COMPARISONS:
        same_value(gold, answer)
