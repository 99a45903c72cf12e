# SPDX-License-Identifier: Apache-2.0
"""Problems to an engine, responses to the scorer, whole problems to whoever keeps them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.evaluation.benches import Bench, BenchProblem
from megatron.rl.evaluation.responses import Response
from megatron.rl.evaluation.settings import EvalSampling, problem_seeds
from megatron.rl.rewards.scoring import ScoreBatch
from megatron.rl.rewards.task import Prompt
from megatron.rl.rollout.protocol import GenerationRequest, RolloutEngine
from megatron.rl.rollout.rollouts import FinishedSequences


class Scorer(Protocol):
    """What gives a score to each response: a `ScoringPool`."""

    def score(self, responses: Sequence[str], prompts: Sequence[Prompt]) -> ScoreBatch:
        """Score ``responses[b]`` as an answer to ``prompts[b]``."""


@dataclass(frozen=True)
class ScoredProblem:
    """All samples of a problem, and what went wrong first while they were scored, if anything."""

    responses: tuple[Response, ...]
    first_error: str | None


@dataclass(frozen=True)
class BenchSampler:
    """Samples and scores problems of one benchmark.

    Attributes:
        on_problem: gets every problem once its last sample has been scored, in the order in which
            they end. It runs in another thread than `sample`, never twice at once, so that the
            engine does not wait for scores. What it raises is raised by `sample`.
    """

    bench: Bench
    engine: RolloutEngine
    tokenizer: PromptTokenizer
    scorer: Scorer
    sampling: EvalSampling
    on_problem: Callable[[ScoredProblem], None]

    def sample(self, problems: Sequence[BenchProblem]) -> None:
        """Sample responses to these problems, at least one, as one request to the engine."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring") as scoring:
            ended: list[Future[None]] = []
            waiting = _Waiting(self.sampling.samples)

            def take(finished: FinishedSequences) -> None:
                for problem, rows in waiting.complete(finished):
                    ended.append(scoring.submit(self._score, problems[problem], rows))
                for future in ended:
                    if future.done():
                        future.result()

            self.engine.generate(self._request(problems), take)
            for future in ended:
                future.result()

    def _request(self, problems: Sequence[BenchProblem]) -> GenerationRequest:
        samples = self.sampling.samples
        seeds = [problem_seeds(self.sampling.seed, p.prompt.text, samples) for p in problems]
        offsets = np.zeros(len(problems) + 1, dtype=np.int64)
        np.cumsum([len(problem.tokens) for problem in problems], out=offsets[1:])
        return GenerationRequest(
            np.concatenate([np.asarray(problem.tokens, dtype=np.int32) for problem in problems]),
            offsets,
            samples,
            self.sampling.request_settings(self.tokenizer.eos_token_ids),
            own_seeds=np.concatenate(seeds),
        )

    def _score(self, problem: BenchProblem, rows: "Sequence[_Sampled]") -> None:
        texts = [self.tokenizer.decode_response(row.tokens) for row in rows]
        scores = self.scorer.score(texts, [problem.prompt] * len(rows))
        responses = tuple(
            Response(
                bench=self.bench.name,
                problem=problem.number,
                sample=sample,
                tokens=len(row.tokens),
                finished=row.finished,
                score=float(scores.scores[sample]),
                answer=scores.answers[sample],
                gold=problem.gold,
                unscored=scores.failures,
                text=texts[sample],
            )
            for sample, row in enumerate(rows)
        )
        self.on_problem(ScoredProblem(responses, scores.first_error))


@dataclass(frozen=True)
class _Sampled:
    """The tokens of a response, and whether it ended."""

    tokens: list[int]
    finished: bool


class _Waiting:
    """Sequences that have ended while others of their problem have not."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._ended: dict[int, dict[int, _Sampled]] = {}

    def complete(self, finished: FinishedSequences) -> list[tuple[int, list[_Sampled]]]:
        """Add sequences; return the problems that are whole by that, as place and samples."""
        whole = []
        rollouts = finished.rollouts
        for row, sequence in enumerate(finished.index.tolist()):
            problem, sample = divmod(sequence, self._samples)
            ended = self._ended.setdefault(problem, {})
            ended[sample] = _Sampled(rollouts.response(row).tolist(), bool(rollouts.finished[row]))
            if len(ended) == self._samples:
                del self._ended[problem]
                whole.append((problem, [ended[number] for number in range(self._samples)]))
        return whole
