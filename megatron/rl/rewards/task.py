# SPDX-License-Identifier: Apache-2.0
"""What a task is: a deterministic source of prompts, and a scorer for responses to them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True)
class Prompt:
    """A question, and what its task needs to score an answer.

    text   what the policy is asked, before any chat or base template
    split  the side of the train/held-out wall that it stands on
    index  its place in that split's sequence; (split, seed, index) gives the same prompt again
    entry  the task's own record: reference answer, metadata; nobody else looks inside
    """

    text: str
    split: Split
    index: int
    entry: Mapping[str, Any]


class Task(Protocol):
    """Prompts with verifiable rewards. Implementations keep two promises:

    - `prompt` depends on its arguments only, and no text occurs in both splits, whatever the seeds;
    - `reward` returns a number in [0, 1] and keeps no state from one response to the next.

    A task may offer more, which is used where it is there:

    - ``num_prompts(split) -> int``: its prompts are finite, and an epoch is all of them;
    - ``answer(response_text) -> str | None``: the answer that a response states, in canonical
      form, for majority votes and the format term;
    - ``reference_answer(prompt) -> str``: the right one, for evaluations;
    - ``removed_from_train: int``: training prompts that it left out since they are held out.
    """

    @property
    def name(self) -> str:
        """The task's name, for messages and logs."""

    def prompt(self, split: Split, seed: int, index: int) -> Prompt:
        """Return the prompt at `index` of the sequence that `split` and `seed` define."""

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Score a response; it may raise, see :func:`~megatron.rl.rewards.scoring.score_batch`."""
