# SPDX-License-Identifier: Apache-2.0
"""Which rows become training problems, and why the others do not."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.rl.data.heldout_index import HeldoutIndex
from megatron.rl.data.problem_files import Problem
from megatron.rl.data.problem_text import has_cjk, integer_answer, normal_text, text_id
from megatron.rl.rewards.answer_format import format_for_problems

# In the order in which a row is asked; it is counted once, under the first that applies.
DROP_REASONS: dict[str, str] = {
    "no_text": "no question (or a chat without exactly one user message)",
    "no_answer": "no answer",
    "repeat": "repeats a row before it",
    "conflict": "one question with different answers: all of them",
    "cjk": "has Chinese, Japanese or Korean letters (--no-cjk)",
    "not_integer": "answer is no integer (--answers integer)",
    "heldout_same": "is a held-out problem (--exclude)",
    "heldout_overlap": "shares half of its text with a held-out problem (--exclude)",
    "too_long": "too many tokens (--max-prompt-tokens)",
}


@dataclass(frozen=True)
class FilterRules:
    """What a training problem must be.

    answers        ``integer``: only problems with an integer answer, in its shortest spelling
    no_cjk         no Chinese, Japanese or Korean letters
    heldout        problems that must not be trained on; None when there are none
    answer_format  whose instruction is added to each question; None: none is
    count_tokens   of such a question in its template; None: any length
    max_tokens     most of them
    """

    answers: Literal["integer", "any"] = "any"
    no_cjk: bool = False
    heldout: HeldoutIndex | None = None
    answer_format: str | None = None
    count_tokens: Callable[[str], int] | None = None
    max_tokens: int = 0


class ProblemFilter:
    """Takes rows one by one; :meth:`kept` then gives those that passed, in their order.

    Attributes:
        dropped: rows dropped so far, by reason; with the kept ones they add up to all rows.
    """

    def __init__(self, rules: FilterRules) -> None:
        self._rules = rules
        self._problems: dict[str, Problem] = {}
        self._answers: dict[str, str] = {}
        self._conflicting: set[str] = set()
        self.dropped: Counter[str] = Counter()

    def add(self, problem: Problem) -> None:
        """Take one row; text or answer is empty where it has none."""
        if not normal_text(problem.text):
            self.dropped["no_text"] += 1
            return
        if not problem.answer:
            self.dropped["no_answer"] += 1
            return
        name = text_id(problem.text)
        answer = integer_answer(problem.answer) or normal_text(problem.answer)
        if name in self._conflicting:
            self.dropped["conflict"] += 1
        elif name not in self._answers:
            self._answers[name] = answer
            self._problems[name] = problem
        elif self._answers[name] == answer:
            self.dropped["repeat"] += 1
        else:
            # The row that came first is no more right than this one.
            self._conflicting.add(name)
            del self._problems[name], self._answers[name]
            self.dropped["conflict"] += 2

    def kept(self, progress: Callable[[int, int], None]) -> dict[str, Problem]:
        """Return the problems that obey the rules, by their ids, and count the others.

        Call it once, after the last row.

        Raises:
            UserError: the answer format does not go with what the problems ask for themselves.
        """
        ask: Callable[[str], str] = str
        if self._rules.answer_format is not None:
            texts = [problem.text for problem in self._problems.values()]
            ask = format_for_problems(self._rules.answer_format, texts).ask
        kept: dict[str, Problem] = {}
        for place, (name, problem) in enumerate(self._problems.items()):
            progress(place, len(self._problems))
            reason = self._broken_rule(problem, ask)
            if reason is not None:
                self.dropped[reason] += 1
            elif self._rules.answers == "integer":
                answer = integer_answer(problem.answer) or ""
                kept[name] = Problem(problem.text, answer, problem.source)
            else:
                kept[name] = problem
        return kept

    def _broken_rule(self, problem: Problem, ask: Callable[[str], str]) -> str | None:
        rules = self._rules
        if rules.no_cjk and has_cjk(problem.text):
            return "cjk"
        if rules.answers == "integer" and integer_answer(problem.answer) is None:
            return "not_integer"
        match = rules.heldout.match(problem.text) if rules.heldout is not None else None
        if match is not None:
            return f"heldout_{match}"
        if (
            rules.count_tokens is not None
            and rules.count_tokens(ask(problem.text)) > rules.max_tokens
        ):
            return "too_long"
        return None
