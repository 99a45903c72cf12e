# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine is asked for, and what it has to offer; its answers are in rollouts.py.

Letters: P prompts, B sequences (P x samples_per_prompt). The sequences of one prompt are
neighbours.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from .array_checks import check_array, check_offsets
from .errors import EngineRequestError
from .rollouts import FinishedSequences, Rollouts
from .topk_columns import Precision

if TYPE_CHECKING:
    import torch

# vLLM silently raises a temperature in (0, 0.01) to 0.01; the trainer would score with another
# one than the engine sampled with, so such temperatures are refused here. Above 2 it refuses.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample. All numbers are checked on construction.

    temperature     logits are divided by it, and log-probs are those of softmax(logits / T).
                    0 means greedy and is for evaluation only.
    max_tokens      a response that reaches it is cut (`finished` is False).
    top_logprobs    K: that many of the largest log-probs are returned with every token.
    topk_precision  how they are stored, see `TopKColumns`: "fp24", or "float32" as the engine has
                    them.
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
    topk_precision: Precision = "fp24"
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
        if self.topk_precision not in get_args(Precision):
            raise EngineRequestError(
                f"topk_precision must be one of {get_args(Precision)}, got {self.topk_precision!r}"
            )
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
    own_max_tokens[B] int32, own_seeds[B] int64: of each sequence, instead of `settings.max_tokens`
    and of what follows from `settings.seed`; for sequences that continue others, see resume.py.
    """

    prompt_tokens: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    samples_per_prompt: int
    settings: SamplingSettings
    first_sequence_index: int = 0
    own_max_tokens: NDArray[np.int32] | None = None
    own_seeds: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        check_array("prompt_tokens", self.prompt_tokens, np.int32, 1, EngineRequestError)
        check_array("prompt_offsets", self.prompt_offsets, np.int64, 1, EngineRequestError)
        check_offsets(
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
        self._check_own("own_max_tokens", self.own_max_tokens, np.int32, 1)
        self._check_own("own_seeds", self.own_seeds, np.int64, 0)

    def _check_own(
        self, name: str, values: NDArray[np.integer[Any]] | None, dtype: type, least: int
    ) -> None:
        if values is None:
            return
        check_array(name, values, dtype, 1, EngineRequestError)
        if len(values) != self.num_sequences or (values < least).any():
            raise EngineRequestError(
                f"{name} must hold {self.num_sequences} numbers of at least {least}, got "
                f"{len(values)} from {values.min(initial=least)} up"
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
        if self.own_seeds is not None:
            return self.own_seeds
        return sequence_seeds(self.settings.seed, self.first_sequence_index, self.num_sequences)

    def max_tokens(self) -> NDArray[np.int32]:
        """Longest response of every sequence [B]."""
        if self.own_max_tokens is not None:
            return self.own_max_tokens
        return np.full(self.num_sequences, self.settings.max_tokens, dtype=np.int32)


OnFinished = Callable[[FinishedSequences], None]


@dataclass(frozen=True)
class WeightsReport:
    """A weight update that is in effect.

    version           what rollouts carry from now on
    tensors           of the checkpoint that were replaced
    nbytes            that travelled, scales included
    seconds           from the first tensor asked for to the last digest compared
    digests_compared  tensors that the engine holds exactly as they were sent
    digests_unmapped  names whose place in the engine could not be read; the log-prob probe
                      covers them
    """

    version: int
    tensors: int
    nbytes: int
    seconds: float
    digests_compared: int
    digests_unmapped: tuple[str, ...]


class EngineDescription(Protocol):
    """What every vLLM engine says of itself, be it ours or a server's."""

    @property
    def vllm_version(self) -> str:
        """Version of the vLLM that samples."""
        ...


class RolloutEngine(Protocol):
    """Anything that can produce rollouts from the current policy."""

    def wait_ready(self) -> EngineDescription | None:
        """Block until it can generate. None: nothing had to start."""
        ...

    def generate(
        self, request: GenerationRequest, on_finished: OnFinished | None = None
    ) -> Rollouts:
        """Sample responses with the weights of the last update.

        `on_finished` gets every sequence that ended, once each, in the order in which they end;
        it runs in the calling thread, and while it does not return the engine has to wait; one
        that takes more than ten minutes counts as gone.
        """
        ...

    def abort(self) -> None:
        """Have a `generate` that runs in another thread return what there is; see resume.py.

        Sequences that had not ended are `aborted` in its result. Without one it does nothing.
        """
        ...

    def update_weights(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> WeightsReport:
        """Replace all weights. Names are those of the Hugging Face checkpoint, exactly once each.

        Either all of them are in effect afterwards, or an error is raised. Rollouts carry
        `version` from then on. `shapes` says beforehand what an iterator will yield: names are
        then checked before the first tensor is made, and sent while others are still made.
        Raises WeightsMismatch when the engine does not hold what was sent.
        """
        ...

    def weight_slot(self, name: str, shape: Sequence[int]) -> "torch.Tensor | None":
        """Where a tensor may be assembled, in the type it has there, so that packing is free.

        For the iterator that `update_weights` reads, which then yields this very memory. None:
        anywhere (it will be quantised, or no engine reads it).
        """
        ...

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Log-probs at temperature 1 of given tokens: of each one but the first, per sequence."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Give up the GPU's memory until `wake`; the weights survive. Only level 1 is taken."""
        ...

    def wake(self) -> None:
        """Take the memory back. The cache is empty, and the weights are those from before."""
        ...

    def close(self) -> None:
        """End the engine and everything that it started. Safe to call twice."""
        ...
