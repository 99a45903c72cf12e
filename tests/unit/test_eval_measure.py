# SPDX-License-Identifier: Apache-2.0
"""A benchmark's metrics and table, against numbers worked out by hand."""

import numpy as np
import pytest

from megatron.rl.evaluation.measure import BenchMetrics, ProblemSamples, measure
from megatron.rl.evaluation.report import format_table


def samples(number: int, scores: list[float], answers: list[str | None]) -> ProblemSamples:
    return ProblemSamples(
        number,
        np.array(scores),
        tuple(answers),
        lengths=np.array([10, 20]) * (number + 1),
        finished=np.array([True, number == 0]),
        unscored=number,
    )


@pytest.fixture
def metrics() -> BenchMetrics:
    problems = [samples(1, [0.0, 0.5], [None, "3"]), samples(0, [1.0, 0.0], ["7", "8"])]
    return measure(problems, has_answers=True)


def test_by_hand(metrics: BenchMetrics) -> None:
    values = {name: estimate.value for name, estimate in metrics.estimates.items()}
    assert values == {
        "avg@2": (0.5 + 0.25) / 2,
        "pass@1": (0.5 + 0.0) / 2,  # partial credit is no pass
        "pass@2": (1.0 + 0.0) / 2,
        "majority@1": (0.5 + 0.25) / 2,
        "majority@2": (0.5 + 0.5) / 2,  # a tie; and the only answer, without the silent one
        "response_length": (15 + 30) / 2,
        "truncated": (0.0 + 0.5) / 2,
        "no_answer": (0.0 + 0.5) / 2,
    }
    assert (metrics.problems, metrics.samples, metrics.responses) == (2, 2, 4)
    assert (metrics.correct, metrics.unscored) == (1, 1)
    variances = [0.5, 0.125]  # of (1, 0) and (0, 0.5), over n - 1
    assert metrics.sampling_stderr == pytest.approx(np.sqrt(sum(v / 2 for v in variances)) / 2)


def test_interval_of_two_problems_reaches_from_one_to_the_other(metrics: BenchMetrics) -> None:
    """A quarter of the resamples hold one problem twice, so both ends lie inside 95 %."""
    interval = metrics.estimates["avg@2"].interval
    assert interval is not None
    assert (interval.low, interval.high) == (0.25, 0.5)


def test_order_of_problems_is_no_matter() -> None:
    """A resumed evaluation finds its problems in another order, and has the same intervals."""
    generator = np.random.default_rng(3)
    problems = [samples(i, generator.random(2).tolist(), [None, None]) for i in range(7)]
    assert measure(problems, has_answers=False) == measure(problems[::-1], has_answers=False)


def test_without_answers_there_is_no_majority() -> None:
    metrics = measure([samples(0, [1.0, 0.0], [None, None])], has_answers=False)
    assert set(metrics.estimates) == {"avg@2", "pass@1", "pass@2", "response_length", "truncated"}


def test_table(metrics: BenchMetrics) -> None:
    other = measure([samples(0, [1.0, 1.0], [None, None])], has_answers=False)
    lines = format_table({"aime24": metrics, "other": other}).splitlines()
    assert lines[0].split() == ["aime24", "other"]
    assert lines[1].split() == ["problems", "x", "samples", "2", "x", "2", "1", "x", "2"]
    (average,) = [line for line in lines if line.startswith("avg@2 %")]
    assert average.split()[2:] == ["37.5", "[25.0,", "50.0]", "100.0"]
    (majority,) = [line for line in lines if line.startswith("majority@2 %")]
    assert majority.split()[-1] == "-"
    (length,) = [line for line in lines if line.startswith("response length, tokens")]
    assert length.split()[-1] == "15"
    assert any(line.split() == ["not", "scored", "1", "0"] for line in lines)
    assert len({len(line) for line in lines}) == 1
