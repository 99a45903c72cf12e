# SPDX-License-Identifier: Apache-2.0
"""A task on which an untrained policy is right about half of the time, and that loads at once."""

import numpy as np

from megatron.rl.rewards.task import Prompt, Split

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_STREAMS = {"train": 0, "heldout": 1}


class ParityTask:
    """Random words as prompts; reward 1 for a response with an even sum of characters.

    The first letter of a word is of the first half of the alphabet in training, of the second one
    in held-out prompts.
    """

    name = "parity"

    def prompt(self, split: Split, seed: int, index: int) -> Prompt:
        """Return a word of three to six letters."""
        random = np.random.default_rng([_STREAMS[split], seed, index])
        half = len(_LETTERS) // 2
        first = int(random.integers(half)) + half * _STREAMS[split]
        others = random.integers(len(_LETTERS), size=random.integers(2, 6))
        return Prompt("".join(_LETTERS[letter] for letter in (first, *others)), split, index, {})

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Return 1 for an even sum, 0 for an odd one."""
        return float(sum(map(ord, response_text)) % 2 == 0)
