# SPDX-License-Identifier: Apache-2.0
"""Which answers are the same: a table of judged pairs, and properties that hold for all of them."""

import signal
import threading

import pytest
from sympy import srepr

from megatron.rl.rewards import symbolic_answers
from megatron.rl.rewards.answer_format import FORMATS
from megatron.rl.rewards.math_equivalence import canonical_answer, compare
from megatron.rl.rewards.symbolic_answers import TooCostlyError
from tests.unit.answer_pairs import DIFFERENT, EQUAL

# What a canonical text leaves out: the unit of a number, and the name of a value.
LEFT_OUT = [
    ("5 \\text{ cm}", "5 \\text{ km}"),
    ("5 \\text{ hours}", "5 minutes"),
    ("x=5", "y=5"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str) -> None:
    assert compare(gold, answer).equal


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold: str, answer: str) -> None:
    assert not compare(gold, answer).equal


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_an_answer_equals_itself_in_every_format(gold: str, answer: str) -> None:
    for text in (gold, answer):
        assert compare(text, text).equal
        for form in FORMATS.values():
            written = form.example.replace("42", text)
            assert compare(text, form.parse(written) or "").equal, written


def test_equal_canonical_texts_mean_equal_answers() -> None:
    merged = [pair for pair in DIFFERENT if len(set(map(canonical_answer, pair))) == 1]
    assert merged == LEFT_OUT
    # And the common spellings fall together, so that votes are not split.
    together = [pair for pair in EQUAL if len(set(map(canonical_answer, pair))) == 1]
    assert len(together) > len(EQUAL) / 2


def test_the_gold_answer_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Row by row what math-verify is given; it is not symmetric.
    given = []
    library = symbolic_answers._library()
    verify = library.verify
    monkeypatch.setattr(
        library,
        "verify",
        lambda gold, answer, **how: (
            given.append((gold, answer, how)) or verify(gold, answer, **how)
        ),
    )
    assert compare("y = 2x + 7", "2x - y + 7 = 0").equal
    ((gold, answer, how),) = given
    assert str(gold[0].lhs) == "y" and str(answer[0].rhs) == "0"
    assert how["timeout_seconds"] is None
    # What the order decides here: an answer may be the value of the gold's equation only when the
    # gold names that value.
    assert compare("x = 5", "5").equal
    assert not compare("x + 1 = 5", "5").equal


def test_a_bare_latex_gold_is_read() -> None:
    # Without dollars around it math-verify finds nothing in it.
    assert compare("\\frac{\\sqrt{3}}{4}", "\\frac{3}{4\\sqrt{3}}").step == "symbolic"
    assert compare("\\frac{\\sqrt{3}}{4}", "\\frac{3}{4\\sqrt{3}}").equal


@pytest.mark.parametrize(
    "text", ["3x^2+x_1", "\\frac{\\pi}{6}", "[0,\\infty)", "y=2x+3", "\\sqrt{2}i"]
)
def test_the_quick_and_the_thorough_parser_read_the_same(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = symbolic_answers._parse.__wrapped__(text)
    library = symbolic_answers._library()
    set_thorough = library.set_thorough
    monkeypatch.setattr(library, "set_thorough", lambda _: set_thorough(True))
    # math-verify keeps what it has read; a space more is another text to it.
    thorough = symbolic_answers._parse.__wrapped__(f" {text}")
    assert quick is not None and srepr(quick) == srepr(thorough)


def test_equality_is_seen_with_and_without_expansion() -> None:
    proofs = [
        ("x^{2}+3x+2", "(x+1)(x+2)", True),
        ("(x+1)^{2000}", "(1+x)^{2000}", False),  # too many terms to write out
        ("\\frac{1}{x+1}+1", "\\frac{x+2}{x+1}", False),  # true, but not shown by expansion
    ]
    for gold, answer, proven in proofs:
        values = [symbolic_answers._parse(text) for text in (gold, answer)]
        assert symbolic_answers._same_expanded(*values) == proven
        assert compare(gold, answer).equal


def test_no_alarm_is_set_and_any_thread_will_do() -> None:
    before = signal.getsignal(signal.SIGALRM)
    verdicts = []

    def work() -> None:
        verdicts.append(compare("3x + 7y", "7y + 3x").equal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert verdicts == [True]
    assert signal.getsignal(signal.SIGALRM) is before and signal.alarm(0) == 0


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "2^{2^{2^{2^2}}}",
        "9**9**9",
        "(10^{9})!",
        "5000!",
        "((3!)!)!",
        "10^{123456}",
        "((9^{999})^{999})^{999}",
        "\\sqrt{" + "7" * 40 + "}",
        "\\sum_{k=1}^{9999999} k^{k}",
        "\\int_0^1 x^x dx",
        "\\binom{10000000}{1000000}",
        "\\Gamma(10^{9})",
        "(1+" * 30 + "x" + ")" * 30,
        "x+" * 500 + "x",
    ],
)
def test_costly_answers_are_refused_before_sympy_sees_them(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic_answers, "_parse", pytest.fail)
    with pytest.raises(TooCostlyError):
        compare("x+3", answer)
    # As a gold answer it still equals itself.
    assert compare(answer, answer).equal


@pytest.mark.parametrize(
    "answer", ["x^{2}+e^{x^2}", "5!", "\\binom{10}{3}", "2^{10}x", "n!", "x^{y^z}"]
)
def test_ordinary_powers_and_factorials_are_not(answer: str) -> None:
    symbolic_answers.check_cost(answer)
