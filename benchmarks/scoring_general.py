# SPDX-License-Identifier: Apache-2.0
r"""Answers that are no integers, right and wrong ones, as a policy writes them.

All are made from a seed, so that none comes twice and a process that scores has seen none before.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.task import Prompt


@dataclass(frozen=True)
class Answer:
    """A gold answer, the same in another spelling, and one that is wrong."""

    gold: str
    right: str
    wrong: str


def _fraction(a: int, b: int, c: int) -> Answer:
    return Answer(f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a * c}}}{{{b * c}}}", f"{a + 1}/{b}")


def _root(a: int, b: int, c: int) -> Answer:
    return Answer(f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}", f"{a}\\sqrt{{{b + 1}}}")


def _sum_with_root(a: int, b: int, c: int) -> Answer:
    return Answer(f"{a}+{c}\\sqrt{{{b}}}", f"{c}\\sqrt{{{b}}}+{a}", f"{a}-{c}\\sqrt{{{b}}}")


def _polynomial(a: int, b: int, c: int) -> Answer:
    spelled = f"{c}x^2+{c * (a + b)}x+{c * a * b}"
    return Answer(spelled, f"{c}(x+{a})(x+{b})", f"{c}(x+{a})(x-{b})")


def _part_of_pi(a: int, b: int, c: int) -> Answer:
    return Answer(f"\\frac{{{a}\\pi}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}\\pi", f"\\frac{{{a}}}{{{b}}}")


def _point(a: int, b: int, c: int) -> Answer:
    half = f"\\frac{{{2 * c + 1}}}{{2}}"
    return Answer(f"({a}, {half}, {b})", f"({a}, {c}.5, {b})", f"({half}, {a}, {b})")


def _interval(a: int, b: int, c: int) -> Answer:
    return Answer(f"({a}.{b},\\infty)", f"x > {a}.{b}", f"[{a}.{b},\\infty)")


def _complex(a: int, b: int, c: int) -> Answer:
    return Answer(f"{a}-{b}i", f"-{b}i+{a}", f"{a}+{b}i")


def _line(a: int, b: int, c: int) -> Answer:
    return Answer(f"y={a}x+{b}", f"y-{a}x={b}", f"y={a}x-{b}")


_KINDS: tuple[Callable[[int, int, int], Answer], ...] = (
    *(_fraction, _root, _sum_with_root, _polynomial, _part_of_pi, _point, _interval, _complex),
    _line,
)
# Those of which neither spelling nor number decides: sympy compares them.
_SYMBOLIC = (_root, _sum_with_root, _polynomial, _part_of_pi, _interval, _complex, _line)


@dataclass(frozen=True)
class GeneralLoad:
    """Responses [B] to prompts [B] of a task, and the scores that they should get."""

    task: TaskSpec
    responses: Sequence[str]
    prompts: Sequence[Prompt]
    scores: Sequence[float]


def general_load(
    folder: Path, problems: int, seed: int, *, symbolic: bool, group: int
) -> GeneralLoad:
    """Return a load whose problems are written to a file in `folder`.

    Args:
        symbolic: only answers that sympy has to compare.
        group: responses to each problem, right and wrong ones by turns.
    """
    draw = random.Random(seed)
    kinds = _SYMBOLIC if symbolic else _KINDS
    answers: dict[str, Answer] = {}
    while len(answers) < problems:
        kind = kinds[len(answers) % len(kinds)]
        made = kind(draw.randint(2, 99), draw.choice((2, 3, 5, 6, 7, 11, 13)), draw.randint(2, 99))
        answers.setdefault(made.gold, made)
    path = folder / f"general-{seed}.jsonl"
    rows = [{"problem": f"Problem {n}.", "answer": gold} for n, gold in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, rows)))
    responses, prompts, scores = [], [], []
    for number, answer in enumerate(answers.values()):
        prompt = Prompt(f"Problem {number}.", "heldout", number, {"answer": answer.gold})
        for sample in range(group):
            right = (number + sample) % 2 == 0
            responses.append(f"So it is \\boxed{{{answer.right if right else answer.wrong}}}.")
            prompts.append(prompt)
            scores.append(float(right))
    return GeneralLoad(TaskSpec("math", {"heldout": str(path)}), responses, prompts, scores)
