# SPDX-License-Identifier: Apache-2.0
"""What n samples of a problem say about the policy: avg@n, pass@k, majority@k, and how surely.

Each estimator is a number per problem; a benchmark's is their mean. All of them are exact: where
k < n, the expectation over all subsets of k samples is computed, not simulated. float64 throughout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

# Numbers of subsets are held in float64, and C(1000, 500) is still finite there.
MAX_SAMPLES = 1000
# Means of resampled problems are computed for so many resamples at a time, to bound the memory.
_RESAMPLES_AT_ONCE = 500


@dataclass(frozen=True)
class Interval:
    """Bounds of a confidence interval."""

    low: float
    high: float


def subset_sizes(samples: int) -> list[int]:
    """Return the k that pass@k and majority@k are reported for: powers of two, and n itself."""
    if not 1 <= samples <= MAX_SAMPLES:
        raise ValueError(f"expected 1 to {MAX_SAMPLES} samples, got {samples}")
    sizes = [1 << power for power in range(samples.bit_length())]
    return sizes if sizes[-1] == samples else [*sizes, samples]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k samples is correct.

    pass@k = 1 - C(n - c, k) / C(n, k), the share of the subsets of k samples, drawn without
    replacement, that hold a correct one. Unlike 1 - (1 - c/n)^k it is unbiased.

    Args:
        samples: n, of the problem.
        correct: c, of them.
        k: 1 to n.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, Eq. 1.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"expected 0 <= c <= n and 1 <= k <= n, got n={samples} c={correct} k={k}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """Return the expected score of the answer that most of k samples give.

    The expectation is over the subsets of k samples, drawn without replacement. Answers that are
    tied for the most votes are equally likely to win, so the order of the samples plays no part. A
    sample without an answer has no vote; where nobody has one, the score is 0. An answer's score is
    the mean over the samples that gave it.

    Counted exactly: for each number of votes m > 0 that the winners may have, a pass over the
    different answers builds N[u, t], the number of ways to choose u samples such that t answers
    have m votes and none has more, and S[u, t], the sum of the tied answers' scores over these
    ways. Then majority@k = sum over m and t of S[k, t] / t / C(n, k).

    Args:
        answers: [n] in canonical form: two answers are the same when the strings are. None: none.
        scores: [n] in [0, 1].
        k: 1 to n.
    """
    samples = len(answers)
    if len(scores) != samples or not 1 <= k <= samples <= MAX_SAMPLES:
        raise ValueError(
            f"expected as many scores as answers, at most {MAX_SAMPLES}, and 1 <= k <= n, got "
            f"{samples} answers, {len(scores)} scores, k={k}"
        )
    votes: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(float(score))
    groups = [(len(given), math.fsum(given) / len(given)) for given in votes.values()]
    silent = samples - sum(count for count, _ in groups)
    most = max((count for count, _ in groups), default=0)
    total = sum(_winning_score(groups, silent, k, m) for m in range(1, min(most, k) + 1))
    return total / math.comb(samples, k)


def _winning_score(groups: Sequence[tuple[int, float]], silent: int, k: int, m: int) -> float:
    """Sum, over the subsets of k in which the winners have m votes, their mean score."""
    ties = k // m
    ways: FloatArray = np.zeros((k + 1, ties + 1))
    sums: FloatArray = np.zeros((k + 1, ties + 1))
    for used in range(min(silent, k) + 1):
        ways[used, 0] = math.comb(silent, used)
    for count, score in groups:
        next_ways, next_sums = np.zeros_like(ways), np.zeros_like(sums)
        for votes in range(min(count, m, k) + 1):
            choices = float(math.comb(count, votes))
            rest = k + 1 - votes
            if votes < m:
                next_ways[votes:] += choices * ways[:rest]
                next_sums[votes:] += choices * sums[:rest]
            else:
                next_ways[votes:, 1:] += choices * ways[:rest, :-1]
                next_sums[votes:, 1:] += choices * (sums[:rest, :-1] + score * ways[:rest, :-1])
        ways, sums = next_ways, next_sums
    return float((sums[k, 1:] / np.arange(1, ties + 1)).sum())


def bootstrap_interval(
    values: FloatArray, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Return the percentile bootstrap interval of the mean over problems.

    Problems are drawn with replacement, each with all of its samples; the samples within a problem
    are not drawn again. The spread of the problems' values holds the noise of their samples
    already, so that drawing both would count it twice. The interval answers "what would another
    set of such problems give"; for "what would the same problems give again" see
    :func:`sampling_stderr`.

    Args:
        values: [P], one a problem.
        level: of confidence.
        seed: of the drawing; the same seed gives the same interval.

    Returns:
        None for fewer than two problems, which have no spread.
    """
    count = len(values)
    if count < 2:
        return None
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, resamples - start)
        drawn = generator.integers(count, size=(size, count))
        means[start : start + size] = values[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def sampling_stderr(scores: FloatArray) -> float | None:
    """Return the standard error of avg@n over the same problems sampled again.

    sqrt(sum over problems of s_p^2 / n) / P, with the unbiased variance s_p^2 of the problem's n
    scores.

    Args:
        scores: [P, n].

    Returns:
        None for a single sample, which has no spread.
    """
    problems, samples = scores.shape
    if samples < 2:
        return None
    return float(np.sqrt((scores.var(axis=1, ddof=1) / samples).sum()) / problems)
