# SPDX-License-Identifier: Apache-2.0
"""An engine whose responses show the seeds that it was given, without a model."""

from collections.abc import Sequence

import numpy as np

from megatron.rl.rollout.protocol import GenerationRequest, OnFinished
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns

STOP = 1


class SeedEngine:
    """Answers each sequence with digits of its seed; sequences end in an order of its own."""

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> None:
        seeds = request.seeds()
        assert seeds is not None and on_finished is not None
        for index in np.random.default_rng(0).permutation(len(seeds)):
            tokens = np.array([seeds[index] % 997 + 2, seeds[index] % 89 + 2, STOP], np.int32)
            finished = bool(seeds[index] % 2)
            tokens = tokens if finished else tokens[:2]
            count = len(tokens)
            rollouts = Rollouts(
                prompt_index=np.array([index // request.samples_per_prompt], np.int32),
                response_tokens=tokens,
                response_offsets=np.array([0, count]),
                log_probs=np.full(count, -1.0, np.float32),
                topk=TopKColumns.empty(1000, 0, "fp24"),
                policy_versions=np.zeros(count, np.int32),
                finished=np.array([finished]),
                aborted=np.array([False]),
                generation_s=0.0,
            )
            on_finished(FinishedSequences(np.array([index]), rollouts))


class WordTokenizer:
    """Shows token ids as words; a prompt is its bytes."""

    eos_token_ids = (STOP,)

    def encode_prompt(self, question: str) -> list[int]:
        return list(question.encode())

    def decode_response(self, tokens: Sequence[int]) -> str:
        return " ".join(str(token) for token in tokens if token != STOP)
