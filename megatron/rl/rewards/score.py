# SPDX-License-Identifier: Apache-2.0
"""The score of one response, or why there is none."""

import math
from dataclasses import dataclass
from enum import IntEnum

from megatron.rl.rewards.task import Prompt, Task

_MAX_REPR_CHARS = 100


class Outcome(IntEnum):
    """How scoring a response ended; without ``SCORED`` its score is 0.

    RAISED    the scorer raised
    INVALID   the score was no finite number in [0, 1], or the response too long to be scored
    TIMED_OUT the scorer was ended at its time limit
    DIED      the scorer's process ended: out of memory, a crash, an exit
    """

    SCORED = 0
    RAISED = 1
    INVALID = 2
    TIMED_OUT = 3
    DIED = 4


@dataclass(frozen=True)
class Score:
    """What scoring one response gave.

    value    in [0, 1]; 0 unless the outcome is SCORED
    answer   the answer that the task found in the response, in canonical form; None without one
    problem  what went wrong, for the log; empty when nothing did
    """

    value: float
    outcome: Outcome = Outcome.SCORED
    answer: str | None = None
    problem: str = ""


def score_response(task: Task, response: str, prompt: Prompt) -> Score:
    """Score `response` as an answer to `prompt`, whatever the scorer does short of not returning.

    Raises:
        MemoryError: nothing can be relied on any more.
    """
    try:
        returned: object = task.reward(response, prompt)
        find_answer = getattr(task, "answer", None)
        answer = None if find_answer is None else find_answer(response)
    except MemoryError:
        raise
    except BaseException as error:  # a scorer may also call sys.exit
        return Score(0.0, Outcome.RAISED, problem=f"raised {_describe(error)}")
    value = as_score(returned)
    if value is None:
        problem = f"returned {_short_repr(returned)}, expected a finite number in [0, 1]"
        return Score(0.0, Outcome.INVALID, problem=problem)
    if not (answer is None or isinstance(answer, str)):
        problem = f"found the answer {_short_repr(answer)}, expected a text or None"
        return Score(0.0, Outcome.INVALID, problem=problem)
    return Score(value, answer=answer)


def as_score(returned: object) -> float | None:
    """Return it as a float if it is a finite number in [0, 1], and None otherwise.

    A text is no number, even if it reads like one.
    """
    if isinstance(returned, str | bytes | bytearray):
        return None
    try:
        value = float(returned)  # type: ignore[arg-type]
    except Exception:  # of a type of the scorer's, whose conversion may do anything
        return None
    return value if math.isfinite(value) and 0.0 <= value <= 1.0 else None


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= _MAX_REPR_CHARS else text[:_MAX_REPR_CHARS] + " ..."
