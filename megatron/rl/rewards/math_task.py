# SPDX-License-Identifier: Apache-2.0
"""Mathematical problems from files, with answers that are compared with the reference answer."""

from pathlib import Path

from megatron.rl.data.problem_files import Problem, read_problems
from megatron.rl.data.problem_text import words
from megatron.rl.errors import UserError
from megatron.rl.rewards import symbolic_answers
from megatron.rl.rewards.answer_format import BOXED, format_for_problems
from megatron.rl.rewards.math_equivalence import canonical_answer, compare
from megatron.rl.rewards.reasoning_gym_task import split_of
from megatron.rl.rewards.task import SPLITS, Prompt, Split


class MathTask:
    """Prompts and scores of problem files; a score is 1 for the reference answer and 0 otherwise.

    Both splits are finite and in the order of their files; index n is the first problem again, and
    the seed has no effect: the order of a run is its prompt source's.

    A problem that stands in both files, word for word without case and punctuation, is taken out of
    the training split. With a training file alone, one problem in eight is held out, by a hash of
    its text (:func:`~.reasoning_gym_task.split_of`).

    Args:
        train: file, folder or ``hf:ORG/NAME`` of the training problems.
        heldout: the same for the held-out ones.
        format: ``boxed``, ``answer_line``, or ``as_is``: the problems already say how to answer.
        layout: of the files, where it is not detected; see
            :func:`~megatron.rl.data.problem_files.read_problems`.

    Raises:
        UserError: no file, an unreadable one, no training problem left, or a format that does not
            go with what the problems ask for.
    """

    def __init__(
        self,
        train: str | None = None,
        heldout: str | None = None,
        format: str = BOXED.name,
        layout: str | None = None,
    ) -> None:
        if train is None and heldout is None:
            raise UserError(
                "task math: expected task.params.train, task.params.heldout or both, the paths of "
                "problem files"
            )
        train_problems = _read("train", train, layout)
        if heldout is None:
            heldout_problems = [one for one in train_problems if split_of(_key(one)) == "heldout"]
        else:
            heldout_problems = _read("heldout", heldout, layout)
        known = {_key(problem) for problem in heldout_problems}
        kept = [problem for problem in train_problems if _key(problem) not in known]
        self._removed = 0 if heldout is None else len(train_problems) - len(kept)
        if train is not None and not kept:
            raise UserError(
                f"task math: all {len(train_problems)} problems of task.params.train "
                f"({train}) are held out; give it other problems, or set task.params.heldout"
            )
        self._problems: dict[Split, list[Problem]] = {"train": kept, "heldout": heldout_problems}
        self._format = format_for_problems(
            format, [problem.text for problem in (*kept, *heldout_problems)]
        )
        # Processes that score are forked from one that has made the task, and may open no file.
        symbolic_answers.load()

    @property
    def name(self) -> str:
        """``math``."""
        return "math"

    @property
    def removed_from_train(self) -> int:
        """Training problems that were taken out because the held-out file has them as well."""
        return self._removed

    def num_prompts(self, split: Split) -> int:
        """Return the number of problems of a split."""
        return len(self._problems[split])

    def prompt(self, split: Split, seed: int, index: int) -> Prompt:
        """Return a problem of the split, at `index` modulo their number; `seed` has no effect."""
        if split not in SPLITS or index < 0:
            raise ValueError(f"expected a split of {SPLITS} and an index >= 0: {split!r}, {index}")
        problems = self._problems[split]
        if not problems:
            raise UserError(f"task math has no {split} problems; set task.params.{split}")
        problem = problems[index % len(problems)]
        entry = {"problem": problem.text, "answer": problem.answer, "source": problem.source}
        return Prompt(self._format.ask(problem.text), split, index, entry)

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Score a response; one whose answer would take unbounded time to compare is wrong."""
        answer = self._format.parse(response_text)
        if answer is None:
            return 0.0
        try:
            return float(compare(prompt.entry["answer"], answer).equal)
        except symbolic_answers.TooCostlyError:
            # The policy's doing, not a failure of the scorer.
            return 0.0

    def answer(self, response_text: str) -> str | None:
        """Return the answer of a response in canonical form; None where it gives none."""
        answer = self._format.parse(response_text)
        return None if answer is None else canonical_answer(answer)

    def reference_answer(self, prompt: Prompt) -> str:
        """Return the reference answer as its file states it."""
        return str(prompt.entry["answer"])


def _read(split: Split, path: str | None, layout: str | None) -> list[Problem]:
    if path is None:
        return []
    if not isinstance(path, str | Path):
        raise UserError(f"task.params.{split}: expected the path of a problem file, got {path!r}")
    return read_problems(path, layout)


def _key(problem: Problem) -> str:
    return " ".join(words(problem.text))
