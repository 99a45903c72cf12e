# SPDX-License-Identifier: Apache-2.0
"""A task on which an untrained policy is right about half of the time."""

from megatron.rl.rewards.reasoning_gym_task import ReasoningGymTask
from megatron.rl.rewards.task import Prompt, Split


class ParityTask:
    """The prompts of a word task; reward 1 for a response with an even sum of characters."""

    name = "parity"

    def __init__(self) -> None:
        self._words = ReasoningGymTask("spell_backward", {"min_word_len": 3, "max_word_len": 5})

    def prompt(self, split: Split, seed: int, index: int) -> Prompt:
        """Return a prompt of the word task."""
        return self._words.prompt(split, seed, index)

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Return 1 for an even sum, 0 for an odd one."""
        return float(sum(map(ord, response_text)) % 2 == 0)
