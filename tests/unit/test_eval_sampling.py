# SPDX-License-Identifier: Apache-2.0
"""Sampling of a benchmark: seeds of their own, whole problems, failures that reach the caller."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.rl.errors import UserError
from megatron.rl.evaluation.benches import Bench, BenchProblem
from megatron.rl.evaluation.responses import Response
from megatron.rl.evaluation.sample import BenchSampler, ScoredProblem
from megatron.rl.evaluation.settings import EvalSampling, problem_seeds
from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.scoring import ScoreBatch
from megatron.rl.rewards.task import Prompt
from tests.unit.eval_engine import SeedEngine, WordTokenizer

BENCH = Bench("b", TaskSpec("unused"), None)
SAMPLING = EvalSampling(samples=3, max_tokens=4, seed=11)


class LengthScorer:
    """Scores by the number of words."""

    def score(self, responses: Sequence[str], prompts: Sequence[Prompt]) -> ScoreBatch:
        scores = np.array([len(text) % 2 for text in responses], dtype=np.float64)
        answers = tuple(f"{prompt.index}:{text}" for text, prompt in zip(responses, prompts))  # noqa: B905
        return ScoreBatch(scores, answers, 1, 0, 1, 0, "too slow")


def problems(count: int) -> list[BenchProblem]:
    return [
        BenchProblem(i, Prompt(f"question {i}", "heldout", i, {}), [5, 6 + i], str(i))
        for i in range(count)
    ]


def sample(chosen: Sequence[BenchProblem], sampling: EvalSampling = SAMPLING) -> list[Response]:
    kept: list[Response] = []
    sampler = BenchSampler(
        BENCH,
        SeedEngine(),  # type: ignore[arg-type]
        WordTokenizer(),  # type: ignore[arg-type]
        LengthScorer(),
        sampling,
        lambda problem: kept.extend(problem.responses),
    )
    sampler.sample(chosen)
    return sorted(kept, key=lambda one: (one.problem, one.sample))


def test_every_sample_of_every_problem_once() -> None:
    responses = sample(problems(5))
    assert [(r.problem, r.sample) for r in responses] == [
        (p, s) for p in range(5) for s in range(3)
    ]
    for response in responses:
        seed = problem_seeds(11, f"question {response.problem}", 3)[response.sample]
        assert response.text == f"{seed % 997 + 2} {seed % 89 + 2}"
        assert response.finished == bool(seed % 2)
        assert response.tokens == (3 if response.finished else 2)
        assert response.score == len(response.text) % 2
        assert response.answer == f"{response.problem}:{response.text}"
        assert (response.gold, response.unscored) == (str(response.problem), 2)


def test_what_is_sampled_beside_a_problem_changes_nothing() -> None:
    whole = sample(problems(6))
    parts = [*sample(problems(6)[4:]), *sample(problems(6)[:1]), *sample(problems(6)[1:4])]
    assert sorted(parts, key=lambda one: (one.problem, one.sample)) == whole


def test_more_samples_repeat_the_first_ones() -> None:
    few = {(r.problem, r.sample): r.text for r in sample(problems(4))}
    more = sample(problems(4), EvalSampling(samples=8, max_tokens=4, seed=11))
    again = {(r.problem, r.sample): r.text for r in more}
    assert few.items() <= again.items() and len(set(again.values())) == 32


def test_seeds_differ_by_seed_and_problem() -> None:
    seeds = [problem_seeds(seed, text, 50) for seed in (0, 1) for text in ("a", "b")]
    assert len(set(np.concatenate(seeds).tolist())) == 200
    assert all((one >= 0).all() for one in seeds)


def test_scoring_runs_beside_the_engine_and_its_failure_is_raised() -> None:
    threads: set[int] = set()

    def full_disk(problem: ScoredProblem) -> None:
        threads.add(threading.get_ident())
        raise OSError("no space left")

    sampler = BenchSampler(
        BENCH,
        SeedEngine(),  # type: ignore[arg-type]
        WordTokenizer(),  # type: ignore[arg-type]
        LengthScorer(),
        SAMPLING,
        full_disk,
    )
    with pytest.raises(OSError, match="no space left"):
        sampler.sample(problems(4))
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"samples": 0}, "samples: expected 1 to 1000"),
        ({"samples": 2, "temperature": 0.0}, "all the same"),
        ({"samples": 1, "temperature": 0.0, "top_p": 0.9}, "top_p has no effect"),
        ({"temperature": 0.001}, "temperature must be 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"min_p": 1.5}, "min_p must be in"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_refused_settings(settings: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        EvalSampling(**settings)  # type: ignore[arg-type]


def test_defaults_of_the_command_are_those_of_the_settings() -> None:
    import argparse

    from megatron.rl.evaluation.command import add_eval

    parser = argparse.ArgumentParser()
    add_eval(parser.add_subparsers())
    options = parser.parse_args(["eval", "model", "--bench", "x"])
    defaults = SimpleNamespace(**vars(options))
    for name in ("samples", "temperature", "top_p", "top_k", "min_p", "seed"):
        assert getattr(defaults, name) == getattr(EvalSampling, name), name
