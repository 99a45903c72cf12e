# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of a run: however many engines share them, the numbers are the same."""

import dataclasses
import json
import resource
from pathlib import Path

import pytest

from megatron.rl.config import Config, parse_config
from megatron.rl.errors import UserError
from megatron.rl.evaluation.in_training import (
    BenchShare,
    RunBenches,
    average_of,
    bench_names,
    measure_shares,
    training_metrics,
)
from megatron.rl.evaluation.responses import read_responses
from megatron.rl.rewards.task import Prompt, Split
from tests.unit.eval_engine import SeedEngine, WordTokenizer

BENCH = "tests.unit.test_eval_in_training:DigitSums"
PROBLEMS, SAMPLES = 7, 3


class DigitSums:
    """Whether the digits of a response add up to an even number."""

    name = "digit_sums"

    def prompt(self, split: Split, seed: int, index: int) -> Prompt:
        return Prompt(f"question {index}", split, index, {})

    def reward(self, response_text: str, prompt: Prompt) -> float:
        return float(self.answer(response_text) == "even")

    def answer(self, response_text: str) -> str:
        odd = sum(map(int, filter(str.isdigit, response_text))) % 2
        return "odd" if odd else "even"


class ProcessorTime(DigitSums):
    """Whether the process that scores may use more than 1000 s of processor time."""

    def reward(self, response_text: str, prompt: Prompt) -> float:
        return float(resource.getrlimit(resource.RLIMIT_CPU)[0] > 1000)


@pytest.fixture
def config() -> Config:
    section = {"benches": [BENCH], "problems": PROBLEMS, "samples": SAMPLES}
    return parse_config({"model": {"path": "x"}, "task": {"name": "x"}, "eval": section})


def shares(config: Config, engines: int, folder: Path) -> list[BenchShare]:
    return [
        RunBenches(config, WordTokenizer(), engine=engine, engines=engines).sample(  # type: ignore[arg-type]
            BENCH,
            SeedEngine(),  # type: ignore[arg-type]
            folder,
        )
        for engine in range(engines)
    ]


def test_engines_share_the_problems(config: Config, tmp_path: Path) -> None:
    alone = shares(config, 1, tmp_path / "alone")
    together = shares(config, 2, tmp_path / "together")
    assert [len(share.problems) for share in together] == [4, 3]
    assert measure_shares(together) == measure_shares(alone)

    (file,) = (tmp_path / "alone").iterdir()
    whole = sorted(read_responses(file), key=lambda one: (one.problem, one.sample))
    parts = [one for path in (tmp_path / "together").iterdir() for one in read_responses(path)]
    assert sorted(parts, key=lambda one: (one.problem, one.sample)) == whole
    assert len(whole) == PROBLEMS * SAMPLES


def test_the_limits_of_scoring_are_those_of_the_run(tmp_path: Path) -> None:
    bench = "tests.unit.test_eval_in_training:ProcessorTime"
    section = {"benches": [bench], "problems": 1, "samples": 1}
    base = {"model": {"path": "x"}, "task": {"name": "x"}}
    config = parse_config(base | {"eval": section, "scoring": {"timeout_s": 2000}})
    benches = RunBenches(config, WordTokenizer(), engine=0, engines=1)  # type: ignore[arg-type]
    share = benches.sample(bench, SeedEngine(), tmp_path)  # type: ignore[arg-type]
    assert share.problems[0].scores.tolist() == [1.0]


def test_more_engines_than_problems(config: Config, tmp_path: Path) -> None:
    benches = RunBenches(config, WordTokenizer(), engine=8, engines=9)  # type: ignore[arg-type]
    share = benches.sample(BENCH, SeedEngine(), tmp_path / "nothing")  # type: ignore[arg-type]
    assert share.problems == () and not (tmp_path / "nothing").exists()


def test_second_try_replaces_the_responses_of_the_first(config: Config, tmp_path: Path) -> None:
    first = shares(config, 1, tmp_path)
    assert measure_shares(shares(config, 1, tmp_path)) == measure_shares(first)
    (file,) = tmp_path.iterdir()
    assert len(list(read_responses(file))) == PROBLEMS * SAMPLES


def test_logged_metrics(config: Config, tmp_path: Path) -> None:
    found = shares(config, 1, tmp_path)
    metrics = measure_shares(found)
    logged = training_metrics("aime24", metrics, found)
    assert set(logged) == {
        *(f"aime24/{name}" for name in metrics.estimates),
        *("aime24/avg@3_low", "aime24/avg@3_high", "aime24/unscored", "aime24/time_s"),
    }
    rows = [one for path in tmp_path.iterdir() for one in read_responses(path)]
    assert logged["aime24/avg@3"] == pytest.approx(sum(r.score for r in rows) / len(rows))
    json.dumps(logged, allow_nan=False)
    words = average_of(logged, "aime24", SAMPLES)
    assert words.startswith(f"avg@3 {logged['aime24/avg@3']:.3f} [")


def test_prompts_have_to_fit_the_engine(config: Config) -> None:
    rollout = dataclasses.replace(config.rollout, max_prompt_tokens=9)
    short = dataclasses.replace(config, rollout=rollout)
    with pytest.raises(UserError, match=r"problem 0 of .* has 10 tokens"):
        RunBenches(short, WordTokenizer(), engine=0, engines=1)  # type: ignore[arg-type]


def test_greedy_heldout_prompts_need_no_benches() -> None:
    section = {"temperature": 0.0}
    config = parse_config({"model": {"path": "x"}, "task": {"name": "x"}, "eval": section})
    RunBenches(config, WordTokenizer(), engine=0, engines=1)  # type: ignore[arg-type]


def test_names() -> None:
    assert bench_names(["aime24", "mine=a/b.jsonl"]) == ["aime24", "mine"]
    assert bench_names({"aime24": "a/b.jsonl"}) == ["aime24"]
