# SPDX-License-Identifier: Apache-2.0
"""A task whose responses are scored by a function of the user's."""

from collections.abc import Callable
from typing import Any

from megatron.rl.rewards.task import Prompt, Split, Task


class OwnReward:
    """Prompts of one task, scores of a function.

    Args:
        task: gives the prompts, and whatever else it offers but its rule.
        function: takes the response text and the prompt, returns a number in [0, 1].
    """

    def __init__(self, task: Task, function: Callable[[str, Prompt], float]) -> None:
        self._task = task
        self._function = function

    @property
    def name(self) -> str:
        """The name of the task that asks."""
        return self._task.name

    def prompt(self, split: Split, seed: int, index: int) -> Prompt:
        """Return the task's prompt."""
        return self._task.prompt(split, seed, index)

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Return what the function says."""
        return self._function(response_text, prompt)

    def __getattr__(self, name: str) -> Any:
        # What a task may offer besides: num_prompts, answer, reference_answer.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._task, name)
