# SPDX-License-Identifier: Apache-2.0
"""Scores of a batch of responses: exactly one each, whatever the scorer does."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.rl.rewards.score import Outcome, Score

_SHOWN_CHARS = 80


@dataclass(frozen=True)
class ScoreBatch:
    """The scores of B responses, in their order.

    scores       [B] float64, finite, in [0, 1]
    answers      [B] what the task found as the answer, in canonical form; None where nothing, and
                 everywhere for a task that has no `answer`
    raised       responses whose scorer raised; they and the following three have score 0
    invalid      responses whose score was no finite number in [0, 1], or that were too long
    timed_out    responses whose scorer was ended at its time limit
    died         responses whose scorer's process ended
    first_error  what went wrong with the first of them, for the log; None when nothing did
    """

    scores: npt.NDArray[np.float64]
    answers: tuple[str | None, ...]
    raised: int
    invalid: int
    timed_out: int
    died: int
    first_error: str | None

    @property
    def failures(self) -> int:
        """Responses that could not be scored, for whatever reason."""
        return self.raised + self.invalid + self.timed_out + self.died


def batch_scores(task_name: str, responses: Sequence[str], scores: Sequence[Score]) -> ScoreBatch:
    """Put single scores together.

    Failures are counted, since a score of 0 alone would hide a broken scorer behind a policy that
    seems not to learn.
    """
    count = Counter(score.outcome for score in scores)
    first_error: str | None = None
    for place, (response, score) in enumerate(zip(responses, scores, strict=True)):
        if score.outcome is not Outcome.SCORED:
            shown = response[:_SHOWN_CHARS]
            first_error = f"{task_name} {score.problem} (response {place}, {shown!r})"
            break
    return ScoreBatch(
        scores=np.array([score.value for score in scores], dtype=np.float64),
        answers=tuple(score.answer for score in scores),
        raised=count[Outcome.RAISED],
        invalid=count[Outcome.INVALID],
        timed_out=count[Outcome.TIMED_OUT],
        died=count[Outcome.DIED],
        first_error=first_error,
    )
