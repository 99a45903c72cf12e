# SPDX-License-Identifier: Apache-2.0
"""What an engine would cut, misread or die of without a word, refused before it travels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import EngineRequestError
from .protocol import GenerationRequest


@dataclass(frozen=True)
class EngineLimits:
    """The largest K, the longest prompt and response together, and the true vocabulary."""

    top_logprobs: int
    max_model_len: int
    vocab_size: int


def check_request(request: GenerationRequest, limits: EngineLimits) -> None:
    """Raise EngineRequestError for a request beyond the limits."""
    settings = request.settings
    if settings.top_logprobs > limits.top_logprobs:
        raise EngineRequestError(
            f"the request asks for top_logprobs={settings.top_logprobs}, the engine was "
            f"started for {limits.top_logprobs}: raise the engine's top_logprobs"
        )
    prompts = np.repeat(np.diff(request.prompt_offsets), request.samples_per_prompt)
    max_tokens = request.max_tokens()
    longest = int(np.argmax(prompts + max_tokens))
    if prompts[longest] + max_tokens[longest] > limits.max_model_len:
        raise EngineRequestError(
            f"a prompt of {prompts[longest]} tokens with max_tokens={max_tokens[longest]} exceeds "
            f"max_model_len={limits.max_model_len}: raise max_model_len, or shorten prompts or "
            "responses (the engine would cut them without a word)"
        )
    _check_ids("prompt token", request.prompt_tokens, limits.vocab_size)
    stops = np.asarray(settings.stop_token_ids, dtype=np.int64)
    _check_ids("stop token", stops, limits.vocab_size)


def check_scored(sequences: Sequence[NDArray[np.int32]], limits: EngineLimits) -> NDArray[np.int64]:
    """Refuse what an engine cannot score; returns where each sequence starts and ends."""
    offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum([len(tokens) for tokens in sequences], out=offsets[1:])
    lengths = np.diff(offsets)
    if len(lengths) == 0 or lengths.min() < 2:
        raise EngineRequestError("a sequence to score needs at least two tokens")
    # One more is sampled, and thrown away: vLLM cannot be asked for less.
    longest = int(lengths.max())
    if longest + 1 > limits.max_model_len:
        raise EngineRequestError(
            f"a sequence of {longest} tokens to score needs max_model_len of at least "
            f"{longest + 1}, got {limits.max_model_len}"
        )
    for tokens in sequences:
        _check_ids("token", tokens, limits.vocab_size)
    return offsets


def check_sleep_level(level: int) -> None:
    """Only level 1 keeps everything that an engine needs to go on."""
    if level != 1:
        raise EngineRequestError(
            f"sleep level {level} is refused, expected 1: level 2 drops the weights and buffers "
            "that no weight update restores (rotary tables), and level 0 frees nothing"
        )


def _check_ids(name: str, ids: NDArray[np.integer], vocab_size: int) -> None:
    """An id beyond the vocabulary ends a vLLM engine that has no tokenizer to check it with."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise EngineRequestError(
            f"{name} {wrong[0]} is outside the vocabulary (0 ... {vocab_size - 1}): is the "
            "tokenizer the model's own?"
        )
