# SPDX-License-Identifier: Apache-2.0
"""Sampled responses as compact arrays, never Python objects per token.

Letters: B sequences, N response tokens of all sequences together, K top log-probs per token.
Sequences are stored back to back; sequence `i` owns `[offsets[i], offsets[i + 1])`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .array_checks import check_array, check_none, check_offsets
from .errors import RolloutDataError
from .topk_columns import LOG_PROB_SLACK, MISSING_LOG_PROB_SENTINEL, TopKColumns


@dataclass(frozen=True)
class Rollouts:
    """Sampled responses with what mu said about them.

    prompt_index[B] int32         index of the sequence's prompt in the request
    response_tokens[N] int32      without the prompt; with the stop token where one was sampled
    response_offsets[B + 1] int64
    log_probs[N] float32          of the sampled token, under softmax(logits / temperature)
    topk [N]                      ids and log-probs of the K largest, largest first
    policy_versions[N] int32      version of the weights that produced each token
    finished[B] bool              True: ended by a stop token. False: cut at max_tokens, or aborted
    aborted[B] bool               True: the engine was told to stop before the sequence ended
    generation_s                  seconds that the engine spent

    The sampled token is among the K or not; its log-prob is in `log_probs` either way. Entry `t`
    of a sequence belongs to its response token `t` (not to the next one).
    """

    prompt_index: NDArray[np.int32]
    response_tokens: NDArray[np.int32]
    response_offsets: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    topk: TopKColumns
    policy_versions: NDArray[np.int32]
    finished: NDArray[np.bool_]
    aborted: NDArray[np.bool_]
    generation_s: float

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything but `generation_s` by name, for a message or a file."""
        arrays: dict[str, NDArray[Any]] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, TopKColumns):
                arrays |= value.arrays()
            elif isinstance(value, np.ndarray):
                arrays[field.name] = value
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], generation_s: float) -> "Rollouts":
        """Undo :meth:`arrays`; raise RolloutDataError for other arrays than those."""
        rest = dict(arrays)
        try:
            topk = TopKColumns.from_arrays(rest)
            for name in topk.arrays():
                del rest[name]
            return cls(**rest, topk=topk, generation_s=generation_s)
        except (KeyError, TypeError) as error:
            raise RolloutDataError(
                f"these arrays are no rollouts ({error}): {sorted(arrays)}"
            ) from None

    @property
    def policy_version(self) -> int:
        """The newest version that produced any of the tokens; -1 when there are none."""
        return int(self.policy_versions.max(initial=-1))

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

    def select(self, sequences: NDArray[np.integer[Any]]) -> "Rollouts":
        """These sequences in this order, as copies; `generation_s` stays that of the whole."""
        lengths = self.lengths[sequences]
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Row j of the result lies as far behind its sequence's start as it did before.
        shift = self.response_offsets[:-1][sequences] - offsets[:-1]
        rows = np.arange(offsets[-1]) + np.repeat(shift, lengths)
        return Rollouts(
            prompt_index=self.prompt_index[sequences],
            response_tokens=self.response_tokens[rows],
            response_offsets=offsets,
            log_probs=self.log_probs[rows],
            topk=self.topk.take(rows),
            policy_versions=self.policy_versions[rows],
            finished=self.finished[sequences],
            aborted=self.aborted[sequences],
            generation_s=self.generation_s,
        )

    @classmethod
    def concatenate(cls, parts: "Sequence[Rollouts]", generation_s: float) -> "Rollouts":
        """The sequences of all parts, one part after the other; at least one part."""
        ends = np.cumsum([0, *(part.num_tokens for part in parts)], dtype=np.int64)
        offsets = [p.response_offsets[1:] + end for p, end in zip(parts, ends, strict=False)]
        return cls(
            prompt_index=np.concatenate([part.prompt_index for part in parts]),
            response_tokens=np.concatenate([part.response_tokens for part in parts]),
            response_offsets=np.concatenate([np.zeros(1, dtype=np.int64), *offsets]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
            topk=TopKColumns.concatenate([part.topk for part in parts]),
            policy_versions=np.concatenate([part.policy_versions for part in parts]),
            finished=np.concatenate([part.finished for part in parts]),
            aborted=np.concatenate([part.aborted for part in parts]),
            generation_s=generation_s,
        )

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise RolloutDataError unless the arrays can be rollouts.

        NaN means that the engine's logits were garbage; -inf for a sampled token means that mu
        could not have produced it. Neither may reach a loss. Ids are 0 ... vocab_size - 1.
        """
        self._check_shapes()
        limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
        tokens = self.response_tokens
        check_none("response token ids outside the vocabulary", (tokens < 0) | (tokens >= limit))
        check_none("NaN among the sampled log-probs", np.isnan(self.log_probs))
        check_none(
            "sampled log-probs that are no log-probs (-inf, above 0, or the sentinel -9999)",
            (self.log_probs == -np.inf)
            | (self.log_probs > LOG_PROB_SLACK)
            | (self.log_probs == MISSING_LOG_PROB_SENTINEL),
        )
        self.topk.check_values(limit)
        check_none("negative policy versions", self.policy_versions < 0)
        check_none("sequences both finished and aborted", self.finished & self.aborted)

    def _check_shapes(self) -> None:
        for name, dtype, ndim in (
            ("prompt_index", np.int32, 1),
            ("response_tokens", np.int32, 1),
            ("response_offsets", np.int64, 1),
            ("log_probs", np.float32, 1),
            ("policy_versions", np.int32, 1),
            ("finished", np.bool_, 1),
            ("aborted", np.bool_, 1),
        ):
            check_array(name, getattr(self, name), dtype, ndim, RolloutDataError)
        tokens, sequences = len(self.response_tokens), len(self.prompt_index)
        check_offsets("response_offsets", self.response_offsets, tokens, RolloutDataError)
        for name, length, expected in (
            ("response_offsets", len(self.response_offsets), sequences + 1),
            ("finished", len(self.finished), sequences),
            ("aborted", len(self.aborted), sequences),
            ("log_probs", len(self.log_probs), tokens),
            ("policy_versions", len(self.policy_versions), tokens),
            ("topk", len(self.topk), tokens),
        ):
            if length != expected:
                raise RolloutDataError(
                    f"{name} has {length} rows, expected {expected} "
                    f"({sequences} sequences, {tokens} tokens)"
                )
        self.topk.check_shapes()
        check_none("negative prompt indices", self.prompt_index < 0)


@dataclass(frozen=True)
class FinishedSequences:
    """Some sequences of a request, whole, while others are still being sampled.

    index[b] int64  which sequences they are, of the request's 0 ... B - 1
    rollouts        these sequences, in this order
    """

    index: NDArray[np.int64]
    rollouts: Rollouts
