# SPDX-License-Identifier: Apache-2.0
"""Benchmarks while a policy trains, on the engines of the run.

Every engine samples its share of the problems, with seeds that follow from ``run.seed`` and the
problems alone: neither the prompts nor the seeds of training rollouts move. The shares are small
tables; the responses stay with the engine that sampled them, in the run folder.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.errors import UserError
from megatron.rl.evaluation.benches import Bench, BenchProblems, find_benches, read_bench
from megatron.rl.evaluation.config_check import bench_sampling
from megatron.rl.evaluation.measure import BenchMetrics, ProblemSamples, measure
from megatron.rl.evaluation.responses import ResponseFile
from megatron.rl.evaluation.results import samples_of
from megatron.rl.evaluation.sample import BenchSampler, ScoredProblem
from megatron.rl.rewards.scoring_pool import ScoringPool
from megatron.rl.rollout.protocol import RolloutEngine

if TYPE_CHECKING:
    from megatron.rl.config import Config

# In the run folder: evaluations/<rollout batches trained on>/<benchmark>[.<engine>].jsonl
EVALUATIONS_FOLDER = "evaluations"


@dataclass(frozen=True)
class BenchShare:
    """What an engine sampled of a benchmark.

    has_answers: whether its task extracts answers. seconds: of sampling and scoring.
    """

    problems: tuple[ProblemSamples, ...]
    has_answers: bool
    seconds: float


class RunBenches:
    """The benchmarks of a run, for the owner of engine number `engine` of `engines`.

    Raises:
        UserError: a benchmark is not to be found, or a prompt is too long for the engine.
    """

    def __init__(
        self, config: "Config", tokenizer: PromptTokenizer, *, engine: int, engines: int
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._file_suffix = "" if engines == 1 else f".{engine}"
        self._shares: dict[str, BenchProblems] = {}
        for bench in run_benches(config):
            whole = read_bench(bench, tokenizer.encode_prompt, config.eval.problems)
            _check_prompts(whole, config.rollout.max_prompt_tokens)
            self._shares[bench.name] = whole.only(lambda one: one.number % engines == engine)

    def sample(self, name: str, engine: RolloutEngine, folder: Path) -> BenchShare:
        """Sample and score this engine's share of a benchmark with the weights that it has.

        Args:
            folder: for the responses; what an earlier try left there is replaced.
        """
        share, sampling = self._shares[name], bench_sampling(self._config)
        started = time.perf_counter()
        scored: list[ScoredProblem] = []
        if share.problems:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name.replace('/', '-')}{self._file_suffix}.jsonl"
            path.unlink(missing_ok=True)
            pool = ScoringPool(share.bench.task, self._config.scoring)
            try:
                with ResponseFile(path, sampling.samples) as file:

                    def keep(problem: ScoredProblem) -> None:
                        file.append(problem.responses)
                        scored.append(problem)

                    sampler = BenchSampler(
                        share.bench, engine, self._tokenizer, pool, sampling, keep
                    )
                    sampler.sample(share.problems)
            finally:
                pool.close()
        return BenchShare(
            tuple(samples_of(problem.responses) for problem in scored),
            share.has_answers,
            time.perf_counter() - started,
        )


def run_benches(config: "Config") -> list[Bench]:
    """Return the benchmarks that a config names."""
    named = config.eval.benches
    texts = [f"{k}={v}" for k, v in named.items()] if isinstance(named, dict) else named
    return find_benches(texts, None if config.eval.data is None else Path(config.eval.data))


def bench_names(benches: Sequence[str] | Mapping[str, str]) -> list[str]:
    """Return the names of the benchmarks of a config, which its metrics carry."""
    return [text.partition("=")[0] for text in benches]


def measure_shares(shares: Sequence[BenchShare]) -> BenchMetrics:
    """Return a benchmark's metrics from the shares of all engines."""
    return measure(
        [problem for share in shares for problem in share.problems],
        has_answers=shares[0].has_answers,
    )


def training_metrics(
    name: str, metrics: BenchMetrics, shares: Sequence[BenchShare]
) -> dict[str, float]:
    """Return the metrics of a benchmark as they are logged, ``<bench>/avg@16`` and so on."""
    average = metrics.estimates[f"avg@{metrics.samples}"]
    logged = {f"{name}/{key}": estimate.value for key, estimate in metrics.estimates.items()}
    if average.interval is not None:
        logged[f"{name}/avg@{metrics.samples}_low"] = average.interval.low
        logged[f"{name}/avg@{metrics.samples}_high"] = average.interval.high
    return logged | {
        f"{name}/unscored": metrics.unscored,
        f"{name}/time_s": max(share.seconds for share in shares),
    }


def _check_prompts(whole: BenchProblems, limit: int) -> None:
    longest = max(whole.problems, key=lambda problem: len(problem.tokens))
    if len(longest.tokens) > limit:
        raise UserError(
            f"eval.benches: problem {longest.number} of {whole.bench.name} has "
            f"{len(longest.tokens)} tokens, rollout.max_prompt_tokens is {limit}: raise it"
        )


def average_of(metrics: Mapping[str, float], name: str, samples: int) -> str:
    """Return a benchmark's avg@n and its interval, from logged metrics, in words."""
    key = f"{name}/avg@{samples}"
    text = f"avg@{samples} {metrics[key]:.3f}"
    if f"{key}_low" in metrics:
        text += f" [{metrics[f'{key}_low']:.3f}, {metrics[f'{key}_high']:.3f}]"
    return text
