# SPDX-License-Identifier: Apache-2.0
"""A batch of tokenized prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.rl.rewards.task import Prompt


@dataclass(frozen=True)
class PromptBatch:
    """P prompts, packed.

    prompt_tokens  [sum of lengths] int32, one prompt behind the other
    offsets        [P + 1] int64; prompt p is ``prompt_tokens[offsets[p]:offsets[p + 1]]``
    prompt_ids     [P] int64, never repeated within a run, so that the responses to a prompt are
                   found again after any shuffling
    prompts        [P] what the scorer needs
    dropped        prompts skipped while this batch was made, for being too long
    """

    prompt_tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    prompt_ids: npt.NDArray[np.int64]
    prompts: tuple[Prompt, ...]
    dropped: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (
            ("prompt_tokens", "int32"),
            ("offsets", "int64"),
            ("prompt_ids", "int64"),
        ):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name}: expected [*] {dtype}, got {array.shape} {array.dtype}")
        count = len(self.prompts)
        if len(self.prompt_ids) != count or len(self.offsets) != count + 1:
            raise ValueError(
                f"{count} prompts need as many ids and one offset more, got "
                f"{len(self.prompt_ids)} ids and {len(self.offsets)} offsets"
            )
        ends_right = self.offsets[0] == 0 and self.offsets[-1] == len(self.prompt_tokens)
        if not ends_right or (np.diff(self.offsets) < 1).any():
            raise ValueError(
                f"offsets must rise from 0 to {len(self.prompt_tokens)}, got {self.offsets}"
            )

    def __len__(self) -> int:
        return len(self.prompts)

    def tokens_of(self, place: int) -> npt.NDArray[np.int32]:
        """Return the token ids of the prompt at `place` of the batch, as a view."""
        return self.prompt_tokens[self.offsets[place] : self.offsets[place + 1]]

    def between(self, start: int, stop: int) -> "PromptBatch":
        """Return the prompts `[start, stop)` of the batch; `dropped` stays that of the whole."""
        first, last = self.offsets[start], self.offsets[stop]
        return PromptBatch(
            self.prompt_tokens[first:last],
            self.offsets[start : stop + 1] - first,
            self.prompt_ids[start:stop],
            self.prompts[start:stop],
            self.dropped,
        )


def pack_prompts(
    token_ids: Sequence[Sequence[int]],
    prompt_ids: Sequence[int],
    prompts: Sequence[Prompt],
    dropped: int = 0,
) -> PromptBatch:
    """Pack prompts, given as a list of token ids each, into a batch."""
    offsets = np.zeros(len(token_ids) + 1, dtype=np.int64)
    offsets[1:] = np.cumsum([len(ids) for ids in token_ids])
    flat = np.fromiter((i for ids in token_ids for i in ids), np.int32, count=int(offsets[-1]))
    return PromptBatch(flat, offsets, np.asarray(prompt_ids, np.int64), tuple(prompts), dropped)
