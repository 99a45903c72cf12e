# SPDX-License-Identifier: Apache-2.0
"""Responses: through the parsers of answers, and through the pool that scores them."""

import json
import math
import random
from pathlib import Path

from megatron.rl.rewards.answer_format import FORMATS
from megatron.rl.rewards.registry import TaskSpec, make_task
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_pool import ScoringPool
from tools.fuzzing.mutations import ODD_TEXTS, damaged_text
from tools.fuzzing.target import WrongAnswer

PROBLEMS = {
    "6 x 7?": "42", "Half?": r"\frac{1}{2}", "A set?": r"\{1, 2\}", "A range?": "(0, 1]",
    "A formula?": "2x^2 + 1", "A vector?": r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "A root?":
    r"\sqrt{2}", "A text?": r"\text{Monday}", "A percentage?": r"50\%", "A pair?": "(1, 2)",
}  # fmt: skip
RESPONSES = (
    "Six times seven is 42, so \\boxed{42}.", "<think>hm</think>\\boxed{\\frac{1}{2}}",
    "Answer: 0.5", "\\boxed{x \\in (0, 1]}", "\\boxed{\\{2, 1\\}}", "Answer: $2x^2+1$",
    "\\boxed{\\sqrt{2}}", "\\boxed{10^{10}}", "\\boxed{1{,}000}", "\\boxed{\\text{Monday}}",
)  # fmt: skip
FRAGMENTS = (
    "\\boxed{", "\\fbox{", "}", "{", "\\frac{", "\\sqrt[", "\\sum_{", "^{", "_{", "!", "9^9^9^9",
    "10**10**10", "\\text{", "<think>", "</think>", "Answer:", "####", "\\left(", "\\right]", "$$",
    "\\infty", "\\pi", "__import__('os')", "lambda: 0", "\\begin{matrix}", "&", "\\\\", "\\int_0^",
    "∞", "½", "٤٢", "１２", "1/0", "0/0", "nan", "1e400", "%", "\\cdot", "|x|", "1,000", "\\cup",
)  # fmt: skip


class Rewards:
    """Every response gets exactly one score, and its parser raises nothing."""

    name = "reward"
    # Some responses that hang, and the processes that take their places.
    limit_s = 60.0

    def prepare(self, folder: Path) -> None:
        """Start the processes that score."""
        path = folder / "problems.jsonl"
        rows = [{"problem": text, "answer": answer} for text, answer in PROBLEMS.items()]
        path.write_text("\n".join(map(json.dumps, rows)))
        spec = TaskSpec("math", {"heldout": str(path)})
        task = make_task(spec)
        self._prompts = [task.prompt("heldout", 0, index) for index in range(len(PROBLEMS))]
        self._pool = ScoringPool(spec, ScoringLimits(workers=2, timeout_s=2.0))
        right = [f"\\boxed{{{answer}}}" for answer in PROBLEMS.values()]
        if self._pool.score(right, self._prompts).scores.tolist() != [1.0] * len(right):
            raise WrongAnswer("right answers were not scored 1")

    def attempt(self, rng: random.Random) -> bool:
        """Score one damaged response; it is accepted where it has an answer."""
        response = damaged_text(rng, rng.choice(RESPONSES), FRAGMENTS)
        if rng.random() < 0.2:
            response = "".join(rng.choices((*FRAGMENTS, *ODD_TEXTS), k=rng.randrange(12)))
        for form in FORMATS.values():
            answer = form.parse(response)
            if answer is not None and not isinstance(answer, str):
                raise WrongAnswer(f"{form.name} gave {answer!r}")
        batch = self._pool.score([response], [rng.choice(self._prompts)])
        (score,) = batch.scores.tolist()
        if len(batch.answers) != 1 or not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise WrongAnswer(f"{batch}")
        if batch.raised and "TooCostlyError" not in str(batch.first_error):
            raise WrongAnswer(str(batch.first_error))
        return batch.answers[0] is not None

    def close(self) -> None:
        """End the processes that score."""
        self._pool.close()
