# SPDX-License-Identifier: Apache-2.0
"""From what vLLM says about one sequence to the columns that are sent, checked on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RolloutDataError
from ..protocol import GenerationRequest, SamplingSettings
from ..rollouts import FinishedSequences, Rollouts
from ..topk_columns import ABSENT_TOKEN_ID, MISSING_LOG_PROB_SENTINEL, TopKColumns


@dataclass(frozen=True, slots=True)
class SplitColumns:
    """vLLM's K + 1 columns per token, split: log_probs[T], topk_ids[T, K], topk_log_probs[T, K]."""

    log_probs: NDArray[np.float32]
    topk_ids: NDArray[np.int32]
    topk_log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodedSequence:
    """One response, number `index` of its request, as it will be sent."""

    index: int
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    topk: TopKColumns
    finished: bool
    aborted: bool

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.log_probs.nbytes + self.topk.nbytes


def encode_sequence(
    index: int,
    token_ids: Sequence[int],
    rows: Any,
    reason: str | None,
    settings: SamplingSettings,
    vocab_size: int,
) -> EncodedSequence:
    """Encode a sequence's tokens and `LogprobRows`; `reason` is vLLM's, None for an aborted one."""
    if reason not in ("stop", "length", None):
        raise RuntimeError(f"vLLM ended a sequence with {reason!r}, expected 'stop' or 'length'")
    tokens = np.asarray(token_ids, dtype=np.int32)
    if len(tokens) == 0:  # aborted before the first token: the rows do not know their width yet
        ids = np.zeros((0, settings.top_logprobs + 1), dtype=np.int32)
        values = ids.astype(np.float32)
    else:
        ids, values = rows.ids, rows.values
    columns = split_columns(tokens, ids, values, settings.top_logprobs)
    topk = TopKColumns.encode(
        columns.topk_ids, columns.topk_log_probs, vocab_size, settings.topk_precision
    )
    return EncodedSequence(
        index, tokens, columns.log_probs, topk, finished=reason == "stop", aborted=reason is None
    )


def join_sequences(
    request: GenerationRequest, sequences: Sequence[EncodedSequence], version: int
) -> FinishedSequences:
    """Sequences as one part of the answer; at least one."""
    index = np.array([sequence.index for sequence in sequences], dtype=np.int64)
    offsets = np.zeros(len(index) + 1, dtype=np.int64)
    np.cumsum([len(sequence.tokens) for sequence in sequences], out=offsets[1:])
    rollouts = Rollouts(
        prompt_index=(index // request.samples_per_prompt).astype(np.int32),
        response_tokens=np.concatenate([sequence.tokens for sequence in sequences]),
        response_offsets=offsets,
        log_probs=np.concatenate([sequence.log_probs for sequence in sequences]),
        topk=TopKColumns.concatenate([sequence.topk for sequence in sequences]),
        policy_versions=np.full(offsets[-1], version, dtype=np.int32),
        finished=np.array([sequence.finished for sequence in sequences], dtype=np.bool_),
        aborted=np.array([sequence.aborted for sequence in sequences], dtype=np.bool_),
        generation_s=0.0,
    )
    return FinishedSequences(index, rollouts)


def split_columns(
    tokens: NDArray[np.int32],
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
    top_logprobs: int,
) -> SplitColumns:
    """Split ids and log-probs [T, K + 1] into the sampled token's log-prob and exactly K top ones.

    vLLM gives the sampled token first and then the K largest, so that the sampled one is there
    twice when it is among them. That order is checked here, by id and by value, and anything else
    is refused: a log-prob read from the wrong column looks plausible and ruins the training.
    """
    expected = (len(tokens), top_logprobs + 1)
    if ids.shape != expected or values.shape != expected:
        raise RolloutDataError(
            f"vLLM returned log-probs of shape {values.shape} and ids of shape {ids.shape}, "
            f"expected {expected} (K={top_logprobs} and the sampled token)"
        )
    sampled, topk_ids, topk = values[:, 0], ids[:, 1:].copy(), values[:, 1:].copy()
    if (ids[:, 0] != tokens).any():
        raise RolloutDataError("vLLM's first log-prob entry of a token is not the sampled token")
    if np.isnan(values).any():
        raise RolloutDataError(
            "vLLM returned NaN log-probs: its logits are garbage. Look at the weights that it "
            "last received"
        )
    if (topk[:, 1:] > topk[:, :-1]).any():
        raise RolloutDataError("vLLM's top-K log-probs are not sorted from the largest down")
    matches = topk_ids == tokens[:, None]
    if (matches.sum(axis=1) > 1).any() or (matches & (topk != sampled[:, None])).any():
        raise RolloutDataError("vLLM's two entries for a sampled token disagree")
    if top_logprobs and (~matches.any(axis=1) & (sampled > topk[:, -1])).any():
        raise RolloutDataError("a sampled token outside the top K is above the K-th log-prob")
    # top-k, top-p or min-p (evaluation only) leave fewer than K tokens: their places are empty.
    absent = (topk == -np.inf) | (topk == MISSING_LOG_PROB_SENTINEL)
    topk_ids[absent] = ABSENT_TOKEN_ID
    topk[absent] = -np.inf
    return SplitColumns(sampled.copy(), topk_ids, topk)
