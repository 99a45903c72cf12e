# SPDX-License-Identifier: Apache-2.0
"""Estimators against enumeration of every subset, in exact fractions."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.rl.evaluation.estimators import (
    bootstrap_interval,
    majority_at_k,
    pass_at_k,
    sampling_stderr,
    subset_sizes,
)

MAX_ENUMERATED = 8


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_subset_sizes(samples: int, sizes: list[int]) -> None:
    assert subset_sizes(samples) == sizes


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one() -> None:
    for n in range(1, MAX_ENUMERATED + 1):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
                share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
                assert pass_at_k(n, correct, k) == pytest.approx(float(share), abs=1e-15)


def enumerated_majority(answers: list[str | None], scores: list[Fraction], k: int) -> Fraction:
    given_by: dict[str, list[Fraction]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            given_by.setdefault(answer, []).append(score)
    value = {answer: sum(given, Fraction(0)) / len(given) for answer, given in given_by.items()}
    total = Fraction(0)
    for subset in itertools.combinations(answers, k):
        votes = Counter(answer for answer in subset if answer is not None)
        if votes:
            winners = [a for a, count in votes.items() if count == max(votes.values())]
            total += sum((value[a] for a in winners), Fraction(0)) / len(winners)
    return total / math.comb(len(answers), k)


@settings(max_examples=300, deadline=None)
@given(
    samples=st.lists(
        st.tuples(st.sampled_from(["1", "2", "3", None]), st.integers(0, 4)),
        min_size=1,
        max_size=MAX_ENUMERATED,
    ),
    data=st.data(),
)
def test_majority_at_k_is_the_mean_over_all_subsets(
    samples: list[tuple[str | None, int]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(samples)))
    answers = [answer for answer, _ in samples]
    quarters = [Fraction(score, 4) for _, score in samples]
    expected = float(enumerated_majority(answers, quarters, k))
    got = majority_at_k(answers, [float(score) for score in quarters], k)
    assert got == pytest.approx(expected, abs=1e-12)


def test_majority_by_hand() -> None:
    # Two for 7 (right), one for 8: 7 wins with all three; of the pairs, 77 is right, 78 a tie.
    answers, scores = ["7", "8", "7"], [1.0, 0.0, 1.0]
    assert majority_at_k(answers, scores, 3) == 1.0
    assert majority_at_k(answers, scores, 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert majority_at_k(["7", "8"], [1.0, 0.0], 2) == 0.5, "a tie is no matter of order"
    assert majority_at_k(["8", "7"], [0.0, 1.0], 2) == 0.5
    assert majority_at_k([None, None, "7"], [0.0, 0.0, 1.0], 3) == 1.0, "silence has no vote"
    assert majority_at_k([None, None], [0.0, 0.0], 1) == 0.0


def test_majority_of_many_samples_stays_exact() -> None:
    """All different answers: every subset is one big tie, whose score is the mean of the scores."""
    n = 64
    scores = (np.arange(n) % 3 == 0).astype(float)
    got = majority_at_k([str(i) for i in range(n)], scores.tolist(), 32)
    assert got == pytest.approx(scores.mean(), rel=1e-12)


def test_bootstrap_interval_is_that_of_a_binomial_mean() -> None:
    """Resampling 0/1 values is drawing from Binomial(P, mean) / P, whose quantiles are known."""
    problems, share = 200, 0.3
    values = np.zeros(problems)
    values[: int(problems * share)] = 1.0
    interval = bootstrap_interval(values)
    assert interval is not None
    chances = [
        math.comb(problems, hits) * share**hits * (1 - share) ** (problems - hits)
        for hits in range(problems + 1)
    ]
    low, high = np.searchsorted(np.cumsum(chances), [0.025, 0.975]) / problems
    one_problem = 1 / problems
    assert interval.low == pytest.approx(low, abs=1.01 * one_problem)
    assert interval.high == pytest.approx(high, abs=1.01 * one_problem)
    assert bootstrap_interval(values) == interval, "the same numbers give the same interval"


def test_bootstrap_interval_covers_the_mean_of_the_population() -> None:
    """95 % intervals over noisy problems hold the true mean about 95 times of 100."""
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        rates = generator.beta(2, 2, size=60)
        values = generator.binomial(4, rates) / 4
        interval = bootstrap_interval(values, resamples=1000)
        assert interval is not None
        covered += interval.low <= 0.5 <= interval.high
    assert 0.90 <= covered / 200 <= 0.99


def test_too_few_for_an_interval() -> None:
    assert bootstrap_interval(np.array([0.5])) is None
    assert sampling_stderr(np.array([[1.0], [0.0]])) is None


def test_sampling_stderr_is_the_spread_of_repeated_evaluations() -> None:
    generator = np.random.default_rng(7)
    rates = np.array([0.1, 0.5, 0.9, 0.0])
    repeats = generator.random((20_000, 4, 8)) < rates[:, None]
    spread = repeats.mean(axis=(1, 2)).std()
    squares = [sampling_stderr(scores.astype(float)) ** 2 for scores in repeats[:4000]]  # type: ignore[operator]
    assert math.sqrt(np.mean(squares)) == pytest.approx(spread, rel=0.02)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, c, k)
