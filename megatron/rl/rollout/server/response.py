# SPDX-License-Identifier: Apache-2.0
"""JSON of vLLM's token-in/token-out route, and the arrays that it becomes.

`/inference/v1/generate` (vLLM 0.32) answers with token ids, never with text. Of the log-probs of a
position it lists as many as were asked for, the sampled token first: when that is not among the
largest, the smallest of these is missing. So K + 1 are asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError, RolloutDataError
from ..protocol import GenerationRequest, SamplingSettings
from ..topk_columns import LOG_PROB_SLACK, MISSING_LOG_PROB_SENTINEL
from ..worker.vllm_sequences import EncodedSequence, encode_sequence

GENERATE_PATH = "/inference/v1/generate"


@dataclass(frozen=True)
class _Rows:
    """ids[T, K + 1] and values[T, K + 1], the sampled token first and then the K largest."""

    ids: NDArray[np.int32]
    values: NDArray[np.float32]


def wanted_logprobs(top_logprobs: int, vocab_size: int) -> int:
    """How many log-probs to ask the server for, to receive the K largest."""
    return min(top_logprobs + 1, vocab_size) if top_logprobs else 0


def generate_body(
    request: GenerationRequest, index: int, request_id: str, vocab_size: int
) -> dict[str, Any]:
    """The JSON that asks for one sequence of a request."""
    settings, seeds = request.settings, request.seeds()
    return {
        "request_id": request_id,
        "token_ids": request.prompt(index // request.samples_per_prompt).tolist(),
        "sampling_params": {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p,
            "seed": None if seeds is None else int(seeds[index]),
            "max_tokens": int(request.max_tokens()[index]),
            "stop_token_ids": list(settings.stop_token_ids),
            "ignore_eos": True,
            "logprobs": wanted_logprobs(settings.top_logprobs, vocab_size),
            "detokenize": False,
        },
    }


def score_body(tokens: NDArray[np.int32]) -> dict[str, Any]:
    """The JSON that asks for the log-probs of a given sequence."""
    return {
        "token_ids": tokens.tolist(),
        "sampling_params": {
            "temperature": 1.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "detokenize": False,
        },
    }


def read_generated(
    answer: Any, index: int, settings: SamplingSettings, vocab_size: int, label: str
) -> EncodedSequence:
    """The sequence in an answer; ``label`` is what the server must call the weights behind it.

    Raises RolloutDataError for what cannot be one, and EngineError for other weights.
    """
    try:
        (choice,) = answer["choices"]
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        content = (choice["logprobs"] or {}).get("content") or []
        _check_versions(choice["weight_versions"] or [], len(tokens), label)
        rows = _rows(content, tokens, settings.top_logprobs)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RolloutDataError(
            f"the server's answer is not that of vLLM's {GENERATE_PATH}: "
            f"{type(error).__name__}: {error}"
        ) from None
    if reason not in ("stop", "length", "abort"):
        raise RolloutDataError(
            f"the server ended a sequence with {reason!r}, expected 'stop', 'length' or 'abort'"
        )
    vllm_reason = None if reason == "abort" else reason
    return encode_sequence(index, tokens, rows, vllm_reason, settings, vocab_size)


def read_scores(answer: Any, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Log-probs [T - 1] of all tokens but the first. Raises RolloutDataError for any other."""
    try:
        rows = answer["prompt_logprobs"]
        if len(rows) != len(tokens) or rows[0] is not None:
            raise ValueError(f"{len(rows)} positions for {len(tokens)} tokens")
        scores = [
            float(row[str(token)]["logprob"])
            for row, token in zip(rows[1:], tokens[1:].tolist(), strict=True)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RolloutDataError(
            f"the server's prompt log-probs are not those of the tokens that were sent: "
            f"{type(error).__name__}: {error}"
        ) from None
    values = np.asarray(scores, dtype=np.float32)
    wrong = ~(values <= LOG_PROB_SLACK) | (values <= MISSING_LOG_PROB_SENTINEL)
    if wrong.any():
        raise RolloutDataError(
            f"the server's prompt log-probs hold {values[wrong][0]} (NaN, -inf, above 0, or the "
            "sentinel -9999): look at the weights that it last received"
        )
    return values


def _check_versions(spans: Sequence[Mapping[str, Any]], count: int, label: str) -> None:
    """Every token must come from the weights that this run gave to the server."""
    covered = 0
    for span in spans:
        if span["version"] != label:
            raise EngineError(
                f"the server sampled with weights called {span['version']!r}, expected {label!r}: "
                "it was restarted, or somebody else updates it. A server belongs to one run"
            )
        if span["start"] != covered:
            raise ValueError("weight_versions do not follow each other")
        covered = span["end"]
    if covered != count:
        raise ValueError(f"weight_versions cover {covered} of {count} tokens")


def _rows(content: Sequence[Mapping[str, Any]], tokens: Sequence[int], k: int) -> _Rows:
    """Put the entries of each position in the order of `_Rows`, by their rank.

    The rank of an entry among the K largest is its place there, 1 to K.
    """
    if len(content) != len(tokens):
        raise ValueError(f"log-probs of {len(content)} positions for {len(tokens)} tokens")
    ids = np.full((len(tokens), k + 1), -1, dtype=np.int32)
    values = np.full((len(tokens), k + 1), np.nan, dtype=np.float32)
    for row, position in enumerate(content):
        ids[row, 0], values[row, 0] = position["token_id"], position["logprob"]
        for entry in position["top_logprobs"]:
            rank = entry["rank"]
            if rank is not None and 1 <= rank <= k:
                ids[row, rank] = entry["token_id"]
                values[row, rank] = entry["logprob"]
    if (ids[:, 1:] < 0).any():
        raise ValueError(f"fewer than the {k} largest log-probs at a position")
    return _Rows(ids, values)
