# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run, in an order that a seed fixes and a checkpoint resumes."""

from collections.abc import Callable, Mapping

import numpy as np

from megatron.rl.data.prompt_batch import PromptBatch, pack_prompts
from megatron.rl.errors import UserError
from megatron.rl.rewards.task import Prompt, Task

# A task that makes its prompts never runs out; an epoch is so many of them, and the next epoch
# brings the same ones in another order.
PROMPTS_PER_EPOCH = 65_536
# Held-out prompts are numbered from here, so that no id occurs on both sides.
HELDOUT_ID_OFFSET = 1 << 62
# The held-out prompts are one fixed set, the same for every run of a task: runs can be compared.
HELDOUT_SEED = 0
# Draws in a row, for each prompt wanted, that may be too long or repeated before we give up.
MAX_DRAWS_PER_PROMPT = 100


class PromptSource:
    """Batches of training prompts, and one fixed set of held-out prompts.

    Draw d of the stream is the prompt at place ``d % prompts_per_epoch`` of epoch ``d //
    prompts_per_epoch``, whose order is a permutation by (seed, epoch). d is also the prompt's id.
    Every rank that builds the source from the same settings sees the same stream.

    Args:
        task: where prompts come from.
        encode: question text to token ids, such as ``PromptTokenizer.encode_prompt``.
        seed: of the prompts and their order.
        max_prompt_tokens: longer prompts are skipped and counted, never cut.
        prompts_per_epoch: different prompts before the first repeats.
    """

    def __init__(
        self,
        task: Task,
        encode: Callable[[str], list[int]],
        *,
        seed: int,
        max_prompt_tokens: int,
        prompts_per_epoch: int = PROMPTS_PER_EPOCH,
    ) -> None:
        if max_prompt_tokens < 1 or prompts_per_epoch < 1:
            raise UserError(
                "expected max_prompt_tokens and prompts_per_epoch of at least 1, got "
                f"{max_prompt_tokens} and {prompts_per_epoch}"
            )
        self._task = task
        self._encode = encode
        self._seed = seed
        self._max_prompt_tokens = max_prompt_tokens
        self._prompts_per_epoch = prompts_per_epoch
        self._next_draw = 0
        self._dropped = 0
        self._order_epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def dropped(self) -> int:
        """Training prompts skipped so far for being too long."""
        return self._dropped

    def next_batch(self, count: int) -> PromptBatch:
        """Return the next `count` training prompts and move the cursor behind them.

        Raises:
            UserError: hardly any prompt is short enough.
        """
        draws: list[int] = []
        prompts: list[Prompt] = []
        token_ids: list[list[int]] = []
        draw = self._next_draw
        while len(prompts) < count:
            if draw - self._next_draw >= MAX_DRAWS_PER_PROMPT * count:
                raise self._too_few(count, len(prompts), "train", draw - self._next_draw)
            prompt = self._task.prompt("train", self._seed, self._index_of(draw))
            ids = self._encode(prompt.text)
            if len(ids) <= self._max_prompt_tokens:
                draws.append(draw)
                prompts.append(prompt)
                token_ids.append(ids)
            draw += 1
        dropped = draw - self._next_draw - count
        self._dropped += dropped
        self._next_draw = draw
        return pack_prompts(token_ids, draws, prompts, dropped)

    def heldout(self, count: int) -> PromptBatch:
        """Return the first `count` different held-out prompts; the cursor stays where it is.

        The set is the same for every seed. It holds no text twice, so that a mean over it does not
        count a prompt double.

        Raises:
            UserError: the split has fewer different prompts that are short enough.
        """
        seen: set[str] = set()
        prompts: list[Prompt] = []
        token_ids: list[list[int]] = []
        for index in range(MAX_DRAWS_PER_PROMPT * count):
            if len(prompts) == count:
                break
            prompt = self._task.prompt("heldout", HELDOUT_SEED, index)
            if prompt.text in seen:
                continue
            seen.add(prompt.text)
            ids = self._encode(prompt.text)
            if len(ids) <= self._max_prompt_tokens:
                prompts.append(prompt)
                token_ids.append(ids)
        if len(prompts) < count:
            raise self._too_few(count, len(prompts), "heldout", MAX_DRAWS_PER_PROMPT * count)
        numbers = range(HELDOUT_ID_OFFSET, HELDOUT_ID_OFFSET + count)
        return pack_prompts(token_ids, numbers, prompts, dropped=len(seen) - count)

    def state(self) -> dict[str, int]:
        """Return the cursor, and what fixes the order, as plain integers."""
        return {
            "seed": self._seed,
            "prompts_per_epoch": self._prompts_per_epoch,
            "next_draw": self._next_draw,
            "dropped": self._dropped,
        }

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue where another source stopped.

        Raises:
            UserError: the state belongs to another order of prompts.
        """
        for name in ("seed", "prompts_per_epoch"):
            if state[name] != self.state()[name]:
                raise UserError(
                    f"the checkpoint's prompts were drawn with {name} {state[name]}, this run has "
                    f"{self.state()[name]}: set it back, or start a new run"
                )
        self._next_draw = state["next_draw"]
        self._dropped = state["dropped"]

    def _index_of(self, draw: int) -> int:
        epoch, place = divmod(draw, self._prompts_per_epoch)
        if epoch != self._order_epoch:
            generator = np.random.default_rng([abs(self._seed), int(self._seed < 0), epoch])
            self._order = generator.permutation(self._prompts_per_epoch)
            self._order_epoch = epoch
        return int(self._order[place])

    def _too_few(self, wanted: int, found: int, split: str, tried: int) -> UserError:
        return UserError(
            f"{self._task.name}: {tried} draws gave only {found} of {wanted} {split} prompts that "
            f"are different and at most {self._max_prompt_tokens} tokens long; raise "
            "rollout.max_prompt_tokens, widen task.params, or ask for fewer prompts"
        )
