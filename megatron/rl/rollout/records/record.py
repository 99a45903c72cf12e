# SPDX-License-Identifier: Apache-2.0
"""A recorded rollout batch in memory: the rollouts, what they answer, and how they were made."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.rl.rollout.protocol import SamplingSettings
from megatron.rl.rollout.rollouts import Rollouts

Purpose = Literal["train", "heldout"]


@dataclass(frozen=True)
class RecordInfo:
    """What all sequences of a record share.

    Attributes:
        purpose: ``train`` or ``heldout``.
        number: of the rollout batch; for ``heldout``, the batches trained on before it.
        engine: number of the engine.
        first_sequence: number of the first sequence within the batch.
        batch_sequences: sequences of the whole batch, over all engines.
        samples_per_prompt: sequences of a group.
        vocab_size: token ids are below it.
        settings: how it was sampled.
        engine_settings: model path, precision, quantization, vLLM's version and arguments.
    """

    purpose: Purpose
    number: int
    engine: int
    first_sequence: int
    batch_sequences: int
    samples_per_prompt: int
    vocab_size: int
    settings: SamplingSettings
    engine_settings: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """B sequences that an engine, or all of them, sampled for one batch; groups are whole.

    prompt_tokens int32, prompt_offsets int64 [B + 1]: one prompt a sequence.
    prompt_ids int64 [B], rewards float64 [B], advantages float32 [B].
    rollouts: the responses; its ``prompt_index`` counts groups from the first one here.
    """

    info: RecordInfo
    prompt_tokens: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    prompt_ids: NDArray[np.int64]
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float32]
    rollouts: Rollouts

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def prompt(self, row: int) -> NDArray[np.int32]:
        """Prompt tokens of one sequence, as a view."""
        return self.prompt_tokens[self.prompt_offsets[row] : self.prompt_offsets[row + 1]]

    def rows(self, start: int, stop: int) -> "Record":
        """The sequences ``[start, stop)`` of this record, whole groups."""
        first, last = self.prompt_offsets[start], self.prompt_offsets[stop]
        return Record(
            dataclasses.replace(self.info, first_sequence=self.info.first_sequence + start),
            self.prompt_tokens[first:last],
            self.prompt_offsets[start : stop + 1] - first,
            self.prompt_ids[start:stop],
            self.rewards[start:stop],
            self.advantages[start:stop],
            _grouped(self.rollouts.select(np.arange(start, stop)), self.info.samples_per_prompt),
        )

    @classmethod
    def join(cls, parts: "Sequence[Record]") -> "Record":
        """Neighbouring parts of one batch as one; at least one part."""
        if len(parts) == 1:
            return parts[0]
        info, rollouts = parts[0].info, [part.rollouts for part in parts]
        joined = Rollouts.concatenate(rollouts, sum(r.generation_s for r in rollouts))
        prompt_lengths = np.concatenate([np.diff(part.prompt_offsets) for part in parts])
        return cls(
            info,
            np.concatenate([part.prompt_tokens for part in parts]),
            np.concatenate([[0], np.cumsum(prompt_lengths)]).astype(np.int64),
            np.concatenate([part.prompt_ids for part in parts]),
            np.concatenate([part.rewards for part in parts]),
            np.concatenate([part.advantages for part in parts]),
            _grouped(joined, info.samples_per_prompt),
        )


def group_index(sequences: int, samples_per_prompt: int) -> NDArray[np.int32]:
    """Number of each sequence's group, where groups lie one after the other."""
    return (np.arange(sequences) // samples_per_prompt).astype(np.int32)


def _grouped(rollouts: Rollouts, samples_per_prompt: int) -> Rollouts:
    index = group_index(rollouts.num_sequences, samples_per_prompt)
    return dataclasses.replace(rollouts, prompt_index=index)
