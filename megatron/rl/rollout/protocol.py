# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine takes and gives: compact arrays, never Python objects per token.

Letters: P prompts, B sequences (P x samples_per_prompt), N response tokens of all sequences
together, K top log-probs per token, V vocabulary. Sequences are stored back to back; sequence
`i` owns `[offsets[i], offsets[i + 1])`. The sequences of one prompt are neighbours.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import EngineRequestError, RolloutDataError

if TYPE_CHECKING:
    import torch

# vLLM silently raises a temperature in (0, 0.01) to 0.01; the trainer would score with another
# one than the engine sampled with, so such temperatures are refused here. Above 2 it refuses.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0

# The OpenAI-style servers write this number where they mean "no value".
MISSING_LOG_PROB_SENTINEL = -9999.0

# A log-prob may exceed 0 only by rounding of a float32 log-softmax.
LOG_PROB_SLACK = 1e-5

ABSENT_TOKEN_ID = -1


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample. All numbers are checked on construction.

    temperature     logits are divided by it, and log-probs are those of softmax(logits / T).
                    0 means greedy and is for evaluation only.
    max_tokens      a response that reaches it is cut (`finished` is False).
    top_logprobs    K: that many of the largest log-probs are returned with every token.
    seed            every sequence gets its own seed derived from it, see `sequence_seeds`.
                    None: the engine's own generator, faster on a GPU, not reproducible.
    stop_token_ids  exactly these tokens end a response. The model folder's own end-of-text ids
                    are not consulted: what ends a response is decided in one place, here.
    training        True (default): the rollouts will be trained on, so anything that changes the
                    support of mu is refused. Evaluation passes False.
    """

    max_tokens: int
    temperature: float = 1.0
    top_logprobs: int = 20
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    training: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise EngineRequestError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise EngineRequestError(
                f"temperature must be 0 (greedy) or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], got "
                f"{self.temperature}: the engine would refuse it, or silently use another one"
            )
        if self.top_logprobs < 0:
            raise EngineRequestError(f"top_logprobs must be >= 0, got {self.top_logprobs}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise EngineRequestError(f"seed must be in [0, 2**63) or None, got {self.seed}")
        if not 0.0 < self.top_p <= 1.0:
            raise EngineRequestError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise EngineRequestError(f"top_k must be >= 0 (0 is off), got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise EngineRequestError(f"min_p must be in [0, 1], got {self.min_p}")
        if any(token < 0 for token in self.stop_token_ids):
            raise EngineRequestError(f"stop_token_ids must be >= 0, got {self.stop_token_ids}")
        if self.training:
            self._check_for_training()

    def _check_for_training(self) -> None:
        """Refuse what makes mu another distribution than the softmax that the trainer scores."""
        if self.temperature == 0.0:
            raise EngineRequestError(
                "temperature 0 cannot be trained on: a greedy token has no behaviour probability. "
                "Use temperature > 0, or training=False for evaluation"
            )
        for name, value, off in (
            ("top_p", self.top_p, 1.0),
            ("top_k", self.top_k, 0),
            ("min_p", self.min_p, 0.0),
        ):
            if value != off:
                raise EngineRequestError(
                    f"{name}={value} is refused for training rollouts: it cuts mu's support and "
                    "renormalises the rest, so every log-ratio pi/mu would be off by the log of "
                    f"the mass that was kept. Set {name}={off}, or training=False for evaluation"
                )


def sequence_seeds(seed: int, first_index: int, count: int) -> NDArray[np.int64]:
    """Seeds of sequences `first_index ... first_index + count - 1`, each in [0, 2**63).

    Seed i is SplitMix64's i-th output from state `seed`, without its lowest bit: neighbouring
    indices and neighbouring seeds give unrelated streams, and a sequence's seed depends on
    nothing but (seed, index), neither on the batch's size nor on the order of execution.
    """
    index = np.arange(first_index + 1, first_index + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + index * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(1)).astype(np.int64)


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts to continue, `samples_per_prompt` times each.

    prompt_tokens[sum of lengths] int32, prompt_offsets[P + 1] int64.
    first_sequence_index: the index of this request's first sequence in the whole batch, when the
    batch is split over several engines; it only enters the seeds, so that engines which share
    `settings.seed` do not share random numbers.
    """

    prompt_tokens: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    samples_per_prompt: int
    settings: SamplingSettings
    first_sequence_index: int = 0

    def __post_init__(self) -> None:
        _check_array("prompt_tokens", self.prompt_tokens, np.int32, 1, EngineRequestError)
        _check_array("prompt_offsets", self.prompt_offsets, np.int64, 1, EngineRequestError)
        _check_offsets(
            "prompt_offsets", self.prompt_offsets, len(self.prompt_tokens), EngineRequestError
        )
        if self.samples_per_prompt < 1:
            raise EngineRequestError(
                f"samples_per_prompt must be at least 1, got {self.samples_per_prompt}"
            )
        if self.first_sequence_index < 0:
            raise EngineRequestError(
                f"first_sequence_index must be >= 0, got {self.first_sequence_index}"
            )
        if self.num_prompts == 0:
            raise EngineRequestError("a request needs at least one prompt, got none")
        empty = np.flatnonzero(np.diff(self.prompt_offsets) == 0)
        if len(empty):
            raise EngineRequestError(
                f"prompt {empty[0]} is empty: give every prompt at least one token"
            )

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        settings: SamplingSettings,
        first_sequence_index: int = 0,
    ) -> "GenerationRequest":
        """The same request from one list of token ids per prompt."""
        offsets = np.zeros(len(prompts) + 1, dtype=np.int64)
        np.cumsum([len(prompt) for prompt in prompts], out=offsets[1:])
        flat = [token for prompt in prompts for token in prompt]
        tokens = np.asarray(flat, dtype=np.int32).reshape(-1)
        return cls(tokens, offsets, samples_per_prompt, settings, first_sequence_index)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_offsets) - 1

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Token ids of one prompt, as a view."""
        return self.prompt_tokens[self.prompt_offsets[index] : self.prompt_offsets[index + 1]]

    def seeds(self) -> NDArray[np.int64] | None:
        """One seed per sequence [B], or None when the settings have no seed."""
        if self.settings.seed is None:
            return None
        return sequence_seeds(self.settings.seed, self.first_sequence_index, self.num_sequences)


@dataclass(frozen=True)
class Rollouts:
    """Sampled responses with what mu said about them.

    prompt_index[B] int32         index of the sequence's prompt in the request
    response_tokens[N] int32      without the prompt; with the stop token where one was sampled
    response_offsets[B + 1] int64
    log_probs[N] float32          of the sampled token, under softmax(logits / temperature)
    topk_ids[N, K] int32          ids of the K largest, largest first; -1 where there is none
    topk_log_probs[N, K] float32  their log-probs; -inf where there is none
    finished[B] bool              True: ended by a stop token. False: cut at max_tokens
    policy_version                the version given with the weights that produced all of it
    generation_s                  seconds that the engine spent

    The sampled token is among the K or not; its log-prob is in `log_probs` either way. Entry `t`
    of a sequence belongs to its response token `t` (not to the next one).
    """

    prompt_index: NDArray[np.int32]
    response_tokens: NDArray[np.int32]
    response_offsets: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    topk_ids: NDArray[np.int32]
    topk_log_probs: NDArray[np.float32]
    finished: NDArray[np.bool_]
    policy_version: int
    generation_s: float

    @property
    def num_sequences(self) -> int:
        return len(self.response_offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.response_tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response length of every sequence [B]."""
        return np.diff(self.response_offsets)

    def response(self, index: int) -> NDArray[np.int32]:
        """Response tokens of one sequence, as a view."""
        return self.response_tokens[self.response_offsets[index] : self.response_offsets[index + 1]]

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise RolloutDataError unless the arrays can be rollouts.

        NaN means that the engine's logits were garbage; -inf for a sampled token means that mu
        could not have produced it. Neither may reach a loss. Ids are 0 ... vocab_size - 1.
        """
        self._check_shapes()
        limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
        tokens = self.response_tokens
        _check_none("response token ids outside the vocabulary", (tokens < 0) | (tokens >= limit))
        _check_none("NaN among the sampled log-probs", np.isnan(self.log_probs))
        _check_none(
            "sampled log-probs that are no log-probs (-inf, above 0, or the sentinel -9999)",
            (self.log_probs == -np.inf)
            | (self.log_probs > LOG_PROB_SLACK)
            | (self.log_probs == MISSING_LOG_PROB_SENTINEL),
        )
        _check_none("NaN among the top-K log-probs", np.isnan(self.topk_log_probs))
        absent = self.topk_ids == ABSENT_TOKEN_ID
        _check_none(
            "top-K entries where only one of id -1 and log-prob -inf is set",
            absent != (self.topk_log_probs == -np.inf),
        )
        _check_none(
            "top-K ids outside the vocabulary",
            ~absent & ((self.topk_ids < 0) | (self.topk_ids >= limit)),
        )
        _check_none(
            "top-K log-probs above 0 or the sentinel -9999",
            (self.topk_log_probs > LOG_PROB_SLACK)
            | (self.topk_log_probs == MISSING_LOG_PROB_SENTINEL),
        )

    def _check_shapes(self) -> None:
        for name, dtype, ndim in (
            ("prompt_index", np.int32, 1),
            ("response_tokens", np.int32, 1),
            ("response_offsets", np.int64, 1),
            ("log_probs", np.float32, 1),
            ("topk_ids", np.int32, 2),
            ("topk_log_probs", np.float32, 2),
            ("finished", np.bool_, 1),
        ):
            _check_array(name, getattr(self, name), dtype, ndim, RolloutDataError)
        tokens, sequences = len(self.response_tokens), len(self.prompt_index)
        _check_offsets("response_offsets", self.response_offsets, tokens, RolloutDataError)
        for name, length, expected in (
            ("response_offsets", len(self.response_offsets), sequences + 1),
            ("finished", len(self.finished), sequences),
            ("log_probs", len(self.log_probs), tokens),
            ("topk_ids", len(self.topk_ids), tokens),
        ):
            if length != expected:
                raise RolloutDataError(
                    f"{name} has {length} rows, expected {expected} "
                    f"({sequences} sequences, {tokens} tokens)"
                )
        if self.topk_ids.shape != self.topk_log_probs.shape:
            raise RolloutDataError(
                f"topk_ids is {self.topk_ids.shape} but topk_log_probs is "
                f"{self.topk_log_probs.shape}"
            )
        _check_none("negative prompt indices", self.prompt_index < 0)


class RolloutEngine(Protocol):
    """Anything that can produce rollouts from the current policy."""

    def generate(self, request: GenerationRequest) -> Rollouts:
        """Sample responses with the weights of the last update."""
        ...

    def update_weights(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
    ) -> None:
        """Replace all weights. Names are those of the Hugging Face checkpoint, exactly once each.

        Either all of them are in effect afterwards, or an error is raised. Rollouts carry
        `version` from then on.
        """
        ...

    def close(self) -> None:
        """End the engine and everything that it started. Safe to call twice."""
        ...


def _check_array(
    name: str, array: NDArray[np.generic], dtype: type, ndim: int, error: type[Exception]
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        got = (
            f"{array.dtype} of shape {array.shape}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise error(f"{name} must be a {ndim}-d {np.dtype(dtype)} array, got {got}")


def _check_offsets(
    name: str, offsets: NDArray[np.int64], total: int, error: type[Exception]
) -> None:
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        ends = "empty" if len(offsets) == 0 else f"{offsets[0]} ... {offsets[-1]}"
        raise error(f"{name} must rise from 0 to {total} without falling, got {ends}")


def _check_none(what: str, bad: NDArray[np.bool_]) -> None:
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        where = first[0] if len(first) == 1 else first
        raise RolloutDataError(
            f"rollouts hold {what}: {int(bad.sum())} of {bad.size}, first at index {where}. "
            "Such rollouts are not trained on; look at the weights that the engine last received"
        )
