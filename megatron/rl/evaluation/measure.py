# SPDX-License-Identifier: Apache-2.0
"""The metrics of a benchmark, from the samples of its problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.rl.evaluation.estimators import (
    FloatArray,
    Interval,
    bootstrap_interval,
    majority_at_k,
    pass_at_k,
    sampling_stderr,
    subset_sizes,
)

# A response is correct with this score; below it has partial credit.
CORRECT = 1.0


@dataclass(frozen=True)
class ProblemSamples:
    """The n samples of a problem.

    scores[n] float64 in [0, 1], lengths[n] int64 in tokens, finished[n] bool: not cut.
    answers: n, None where there is none. unscored: samples that could not be scored.
    """

    problem: int
    scores: FloatArray
    answers: tuple[str | None, ...]
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]
    unscored: int

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def correct(self) -> int:
        """Samples with a full score."""
        return int((self.scores >= CORRECT).sum())


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and the interval that resampled problems give; see estimators.py."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class BenchMetrics:
    """What a benchmark's table shows.

    estimates by name, each the mean over problems of a problem's value:

    - ``avg@n``: mean score; ``pass@k``, ``majority@k`` for the k of ``subset_sizes(n)``, the
      latter only where the task extracts answers
    - ``response_length`` in tokens; ``truncated``: share that was cut; ``no_answer``: share
      without one, only where the task extracts answers

    sampling_stderr: of avg@n, for the same problems sampled again.
    correct, unscored, responses: counts over all problems.
    """

    problems: int
    samples: int
    estimates: dict[str, Estimate]
    sampling_stderr: float | None
    correct: int
    unscored: int
    responses: int


def measure(problems: Sequence[ProblemSamples], *, has_answers: bool) -> BenchMetrics:
    """Compute a benchmark's metrics from all of its problems, at least one; n is the same for all.

    Args:
        has_answers: whether the task extracts answers.
    """
    problems = sorted(problems, key=lambda one: one.problem)
    samples = len(problems[0])
    scores = np.stack([one.scores for one in problems])
    return BenchMetrics(
        problems=len(problems),
        samples=samples,
        estimates={
            name: _estimate([value(one) for one in problems])
            for name, value in _values(samples, has_answers).items()
        },
        sampling_stderr=sampling_stderr(scores),
        correct=sum(one.correct for one in problems),
        unscored=sum(one.unscored for one in problems),
        responses=scores.size,
    )


def _values(samples: int, has_answers: bool) -> dict[str, Callable[[ProblemSamples], float]]:
    """A problem's value of each metric."""
    sizes = subset_sizes(samples)
    values: dict[str, Callable[[ProblemSamples], float]] = {
        f"avg@{samples}": lambda one: float(one.scores.mean())
    }
    for k in sizes:
        values[f"pass@{k}"] = lambda one, k=k: pass_at_k(samples, one.correct, k)  # type: ignore[misc]
    for k in sizes if has_answers else ():
        values[f"majority@{k}"] = lambda one, k=k: majority_at_k(  # type: ignore[misc]
            one.answers, one.scores.tolist(), k
        )
    values["response_length"] = lambda one: float(one.lengths.mean())
    values["truncated"] = lambda one: float(1 - one.finished.mean())
    if has_answers:
        values["no_answer"] = lambda one: one.answers.count(None) / len(one)
    return values


def _estimate(values: Sequence[float]) -> Estimate:
    array = np.asarray(values, dtype=np.float64)
    return Estimate(float(array.mean()), bootstrap_interval(array))
