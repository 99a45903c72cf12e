# SPDX-License-Identifier: Apache-2.0
"""How an evaluation samples, and the seed of each of its sequences."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.rl.errors import UserError
from megatron.rl.evaluation.estimators import MAX_SAMPLES
from megatron.rl.rollout.errors import EngineRequestError
from megatron.rl.rollout.protocol import SamplingSettings, sequence_seeds


@dataclass(frozen=True)
class EvalSampling:
    """Sampling of an evaluation.

    With temperature 1 and nothing cut off (the defaults), avg@n estimates the expected score of
    the very distribution that is trained. top_p, top_k and min_p evaluate another one.

    samples      n, responses to each problem
    temperature  0 is greedy, with a single sample
    top_p, top_k, min_p  1, 0 and 0 are off
    max_tokens   longest response
    seed         the same seed gives a problem's sample the same random numbers

    Raises:
        UserError: out of range, or without effect.
    """

    samples: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise UserError(f"samples: expected 1 to {MAX_SAMPLES}, got {self.samples}")
        if self.temperature == 0.0:
            if self.samples > 1:
                raise UserError(
                    f"samples: expected 1 with temperature 0, got {self.samples}: greedy responses "
                    "to a problem are all the same; raise temperature, or ask for one sample"
                )
            for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                if getattr(self, name) != off:
                    raise UserError(f"{name} has no effect with temperature 0; leave it out")
        try:
            self.request_settings(())
        except EngineRequestError as error:
            raise UserError(str(error)) from None

    def request_settings(self, stop_token_ids: tuple[int, ...]) -> SamplingSettings:
        """Return what an engine is asked for."""
        return SamplingSettings(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            top_logprobs=0,
            seed=self.seed,
            stop_token_ids=stop_token_ids,
            training=False,
        )


def problem_seeds(seed: int, question: str, samples: int) -> NDArray[np.int64]:
    """Return the seeds [n] of a problem's samples, each in [0, 2**63).

    They follow from the evaluation's seed, the problem's text and the sample's number alone: not
    from the problem's place, the number of samples, or what is sampled beside it. An evaluation
    that is resumed, cut to fewer problems or given more samples repeats what it has in common.
    """
    digest = hashlib.blake2b(f"{seed}\0{question}".encode(), digest_size=8).digest()
    return sequence_seeds(int.from_bytes(digest, "big") >> 1, 0, samples)
