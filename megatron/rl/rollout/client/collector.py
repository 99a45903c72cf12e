# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of an answer together, whatever order and however often they arrive."""

import numpy as np

from ..errors import RolloutDataError
from ..protocol import GenerationRequest, OnFinished
from ..rollouts import FinishedSequences, Rollouts
from ..topk_columns import TopKColumns


class SequenceCollector:
    """The sequences of one request that have arrived so far, each once.

    An engine process that was replaced repeats the request and sends everything again. With a
    seed the repetition is the same; without one, a sequence that was delivered stays as it was.
    """

    def __init__(
        self, request: GenerationRequest, vocab_size: int, on_finished: OnFinished | None
    ) -> None:
        self._request = request
        self._vocab_size = vocab_size
        self._on_finished = on_finished
        self._arrived = np.zeros(request.num_sequences, dtype=np.bool_)
        self._indices: list[np.ndarray] = []
        self._parts: list[Rollouts] = []

    def add(self, sequences: FinishedSequences) -> None:
        """Take what is new and pass on those of it that ended.

        Raises RolloutDataError for what cannot be rollouts of this request.
        """
        index, rollouts = sequences.index, sequences.rollouts
        count = len(self._arrived)
        if ((index < 0) | (index >= count)).any() or len(np.unique(index)) != len(index):
            raise RolloutDataError(
                f"the engine sent sequences {index.tolist()} of {count}, or one of them twice"
            )
        rollouts.validate(self._vocab_size)
        if rollouts.topk.k != self._request.settings.top_logprobs:
            raise RolloutDataError(
                f"the engine sent the top {rollouts.topk.k} log-probs, expected "
                f"{self._request.settings.top_logprobs}"
            )
        new = np.flatnonzero(~self._arrived[index])
        if len(new) == 0:
            return
        if len(new) < len(index):
            index, rollouts = index[new], rollouts.select(new)
        self._arrived[index] = True
        self._indices.append(index)
        self._parts.append(rollouts)
        ended = np.flatnonzero(~rollouts.aborted)
        if self._on_finished is not None and len(ended):
            if len(ended) < len(index):
                index, rollouts = index[ended], rollouts.select(ended)
            self._on_finished(FinishedSequences(index, rollouts))

    def missing(self) -> int:
        """How many sequences have not arrived."""
        return int((~self._arrived).sum())

    def abort_missing(self) -> None:
        """Count what has not arrived as aborted before its first token."""
        index = np.flatnonzero(~self._arrived)
        settings = self._request.settings
        nothing = Rollouts(
            prompt_index=(index // self._request.samples_per_prompt).astype(np.int32),
            response_tokens=np.zeros(0, dtype=np.int32),
            response_offsets=np.zeros(len(index) + 1, dtype=np.int64),
            log_probs=np.zeros(0, dtype=np.float32),
            topk=TopKColumns.empty(
                self._vocab_size, settings.top_logprobs, settings.topk_precision
            ),
            policy_versions=np.zeros(0, dtype=np.int32),
            finished=np.zeros(len(index), dtype=np.bool_),
            aborted=np.ones(len(index), dtype=np.bool_),
            generation_s=0.0,
        )
        if len(index):
            self.add(FinishedSequences(index, nothing))

    def rollouts(self, generation_s: float) -> Rollouts:
        """All sequences in the order of the request; every one must have arrived."""
        order = np.argsort(np.concatenate(self._indices))
        return Rollouts.concatenate(self._parts, generation_s).select(order)
