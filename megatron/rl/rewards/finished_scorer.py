# SPDX-License-Identifier: Apache-2.0
"""Scores of the responses of one request, each given once its sequence has ended."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np

from megatron.rl.data.prompt_batch import PromptBatch
from megatron.rl.rewards.scoring_pool import ScoringPool
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts


class FinishedScorer:
    """Scores sequences while the engine samples others.

    Sequences are only queued when they end: the engine waits for whoever takes its answers, and
    responses that run into their time limit may hold up the pool for minutes. Used as a context;
    what is queued when it is left by an error is dropped.

    Attributes, complete after :meth:`finish`:
        scores: float64 [B], in the order of the request's sequences.
        answers: [B], what the task found as the answer of each.
        failures: responses that could not be scored, those out of time included; their score is 0.
        timeouts: responses whose scorer was ended at its time limit.
        first_error: what went wrong first; None when nothing did.
        seconds: spent scoring.
    """

    def __init__(
        self,
        pool: ScoringPool,
        decode: Callable[[Sequence[int]], str],
        prompts: PromptBatch,
        num_sequences: int,
    ) -> None:
        self._pool = pool
        self._decode = decode
        self._prompts = prompts
        self._queued = np.zeros(num_sequences, dtype=np.bool_)
        # One thread: batches are scored in the order in which they end.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
        self._batches: list[Future[None]] = []
        self.scores = np.zeros(num_sequences, dtype=np.float64)
        self.answers: list[str | None] = [None] * num_sequences
        self.failures = 0
        self.timeouts = 0
        self.first_error: str | None = None
        self.seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def score(self, finished: FinishedSequences) -> None:
        """Queue some sequences; an engine calls it from within ``generate``."""
        self._queued[finished.index] = True
        self._batches.append(self._thread.submit(self._score, finished))

    def finish(self, rollouts: Rollouts) -> None:
        """Score what has not been queued, sequences that were aborted, and wait for everything.

        Raises:
            ScoringFailed: nothing can be scored any more.
        """
        rest = np.flatnonzero(~self._queued)
        if len(rest):
            self.score(FinishedSequences(rest, rollouts.select(rest)))
        for batch in self._batches:
            batch.result()

    def _score(self, finished: FinishedSequences) -> None:
        started = time.perf_counter()
        rollouts, count = finished.rollouts, len(finished.index)
        responses = [self._decode(rollouts.response(b).tolist()) for b in range(count)]
        asked = [self._prompts.prompts[prompt] for prompt in rollouts.prompt_index]
        batch = self._pool.score(responses, asked)
        self.scores[finished.index] = batch.scores
        for index, answer in zip(finished.index, batch.answers, strict=True):
            self.answers[index] = answer
        self.failures += batch.failures
        self.timeouts += batch.timed_out
        self.first_error = self.first_error or batch.first_error
        self.seconds += time.perf_counter() - started
