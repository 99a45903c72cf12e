# SPDX-License-Identifier: Apache-2.0
"""A benchmark that an untrained policy solves about half of the time, with answers to vote on."""

from megatron.rl.rewards.task import Prompt
from tests.e2e.parity_task import ParityTask


class ParityBench(ParityTask):
    """Even or odd, by the sum of a response's characters; a response below four characters says
    neither, and counts as wrong.
    """

    name = "parity_bench"

    def answer(self, response_text: str) -> str | None:
        """Return what the response counts as."""
        if len(response_text) < 4:
            return None
        return "even" if sum(map(ord, response_text)) % 2 == 0 else "odd"

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Return 1 for an even response."""
        return float(self.answer(response_text) == "even")
