# SPDX-License-Identifier: Apache-2.0
"""Rewards of the responses of one request, each given as soon as its sequence has ended."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from megatron.rl.data.prompt_batch import PromptBatch
from megatron.rl.rewards.scoring import score_batch
from megatron.rl.rewards.task import Task
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts


class FinishedScorer:
    """Scores sequences while the engine samples others.

    Attributes:
        rewards: float64 [B], in the order of the request's sequences.
        failures: responses that could not be scored; their reward is 0.
        first_error: what went wrong first; None when nothing did.
        seconds: spent scoring.
    """

    def __init__(
        self,
        task: Task,
        decode: Callable[[Sequence[int]], str],
        prompts: PromptBatch,
        num_sequences: int,
    ) -> None:
        self._task = task
        self._decode = decode
        self._prompts = prompts
        self._scored = np.zeros(num_sequences, dtype=np.bool_)
        self.rewards = np.zeros(num_sequences, dtype=np.float64)
        self.failures = 0
        self.first_error: str | None = None
        self.seconds = 0.0

    def score(self, finished: FinishedSequences) -> None:
        """Score some sequences; an engine calls it from within ``generate``."""
        started = time.perf_counter()
        rollouts, count = finished.rollouts, len(finished.index)
        responses = [self._decode(rollouts.response(b).tolist()) for b in range(count)]
        asked = [self._prompts.prompts[prompt] for prompt in rollouts.prompt_index]
        scores = score_batch(self._task, responses, asked)
        self.rewards[finished.index] = scores.rewards
        self._scored[finished.index] = True
        self.failures += scores.raised + scores.invalid
        self.first_error = self.first_error or scores.first_error
        self.seconds += time.perf_counter() - started

    def score_rest(self, rollouts: Rollouts) -> None:
        """Score what has not been: sequences that were aborted."""
        rest = np.flatnonzero(~self._scored)
        if len(rest):
            self.score(FinishedSequences(rest, rollouts.select(rest)))
