# SPDX-License-Identifier: Apache-2.0
"""The cheapest task that scores at all: what is left is the cost of scoring in processes."""

from megatron.rl.rewards.task import Prompt


class Integers:
    """Responses that are integers; "hang" never returns."""

    name = "integers"

    def prompt(self, split: str, seed: int, index: int) -> Prompt:
        """Ask for `index`."""
        return Prompt(f"What is {index} + 0?", "train", index, {"answer": str(index)})

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Compare as integers."""
        while response_text == "hang":
            pass
        return float(int(response_text) == int(prompt.entry["answer"]))
