# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run, in an order that a seed fixes and a checkpoint resumes."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypedDict

import numpy as np

from megatron.rl.data.prompt_batch import PromptBatch, pack_prompts
from megatron.rl.errors import UserError
from megatron.rl.rewards.task import Prompt, Split, Task

# A task that makes its prompts never runs out; an epoch is so many of them, and the next epoch
# brings the same ones in another order.
PROMPTS_PER_EPOCH = 65_536
# Held-out prompts are numbered from here, so that no id occurs on both sides.
HELDOUT_ID_OFFSET = 1 << 62
# The held-out prompts are one fixed set, the same for every run of a task: runs can be compared.
HELDOUT_SEED = 0
# Draws in a row, for each prompt wanted, that may be too long or repeated before we give up.
MAX_DRAWS_PER_PROMPT = 100


class PromptState(TypedDict):
    """Where a source stopped, and what fixes its order.

    data: hash of a finite task's problems, in their order; the task's name where they never end.
    """

    seed: int
    prompts_per_epoch: int
    data: str
    next_draw: int
    dropped: int


class PromptSource:
    """Batches of training prompts, and one fixed set of held-out prompts.

    Draw d of the stream is the prompt at place ``d % prompts_per_epoch`` of epoch ``d //
    prompts_per_epoch``, whose order is a permutation by (seed, epoch). d is also the prompt's id.
    Every rank that builds the source from the same settings sees the same stream.

    A task with ``num_prompts`` is finite: an epoch is all of its training problems, each of them
    exactly once. Problems that are too long are skipped in every epoch, and counted each time.

    Args:
        task: where prompts come from.
        encode: question text to token ids, such as ``PromptTokenizer.encode_prompt``.
        seed: of the prompts and their order.
        max_prompt_tokens: longer prompts are skipped and counted, never cut.
        prompts_per_epoch: different prompts before the first repeats; by default all of a finite
            task, which takes no other number, or :data:`PROMPTS_PER_EPOCH`.

    Raises:
        UserError: a limit below 1, a finite task without training problems, or one with a
            prompts_per_epoch.
    """

    def __init__(
        self,
        task: Task,
        encode: Callable[[str], list[int]],
        *,
        seed: int,
        max_prompt_tokens: int,
        prompts_per_epoch: int | None = None,
    ) -> None:
        finite = num_prompts(task, "train")
        if finite is not None and prompts_per_epoch is not None:
            raise UserError(
                f"{task.name}: an epoch is all of its {finite} problems; expected no "
                f"prompts_per_epoch, got {prompts_per_epoch}"
            )
        if prompts_per_epoch is None:
            prompts_per_epoch = PROMPTS_PER_EPOCH if finite is None else finite
        if max_prompt_tokens < 1 or prompts_per_epoch < 1:
            raise UserError(
                f"{task.name}: expected max_prompt_tokens and prompts in an epoch of at least 1, "
                f"got {max_prompt_tokens} and {prompts_per_epoch}"
            )
        self._is_finite = finite is not None
        self._data: str | None = None
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

    def at(self, draws: Sequence[int]) -> PromptBatch:
        """Return the prompts of these draws, whose ids they are; the cursor stays where it is."""
        prompts = [
            self._task.prompt("train", self._seed, self._index_of(int(draw))) for draw in draws
        ]
        token_ids = [self._encode(prompt.text) for prompt in prompts]
        return pack_prompts(token_ids, [int(draw) for draw in draws], prompts)

    def heldout(self, count: int | None) -> PromptBatch:
        """Return the first `count` different held-out prompts; the cursor stays where it is.

        The set is the same for every seed. It holds no text twice, so that a mean over it does not
        count a prompt double.

        Args:
            count: None for all of a finite split that are short enough.

        Raises:
            UserError: the split has fewer different prompts that are short enough.
        """
        size = num_prompts(self._task, "heldout")
        if count is None and size is None:
            raise UserError(f"{self._task.name}: held-out prompts never end, ask for a number")
        draws = size if size is not None else MAX_DRAWS_PER_PROMPT * (count or 1)
        seen: set[str] = set()
        prompts: list[Prompt] = []
        token_ids: list[list[int]] = []
        for index in range(draws):
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
        if not prompts or (count is not None and len(prompts) < count):
            raise self._too_few(count or 1, len(prompts), "heldout", draws)
        numbers = range(HELDOUT_ID_OFFSET, HELDOUT_ID_OFFSET + len(prompts))
        return pack_prompts(token_ids, numbers, prompts, dropped=len(seen) - len(prompts))

    def state(self) -> PromptState:
        """Return the cursor, and what fixes the order."""
        if self._data is None:
            self._data = self._data_digest()
        return {
            "seed": self._seed,
            "prompts_per_epoch": self._prompts_per_epoch,
            "data": self._data,
            "next_draw": self._next_draw,
            "dropped": self._dropped,
        }

    def load_state(self, state: PromptState) -> None:
        """Continue where another source stopped, in the middle of an epoch or not.

        Raises:
            UserError: the state belongs to other problems, or to another order of them.
        """
        own = self.state()
        for what, theirs, ours in (
            ("seed", state["seed"], own["seed"]),
            ("prompts in an epoch", state["prompts_per_epoch"], own["prompts_per_epoch"]),
            ("problems", state["data"], own["data"]),
        ):
            if theirs != ours:
                raise UserError(
                    f"the checkpoint's prompts were drawn with {what} {theirs}, this run has "
                    f"{ours}: use the same data and settings, or start a new run"
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

    def _data_digest(self) -> str:
        """Hash all questions and answers of a finite task; name any other."""
        if not self._is_finite:
            return self._task.name
        digest = hashlib.blake2b(digest_size=16)
        for index in range(self._prompts_per_epoch):
            prompt = self._task.prompt("train", self._seed, index)
            for part in (prompt.text, str(prompt.entry.get("answer"))):
                raw = part.encode(errors="replace")
                digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()

    def _too_few(self, wanted: int, found: int, split: str, tried: int) -> UserError:
        return UserError(
            f"{self._task.name}: {tried} draws gave only {found} of {wanted} {split} prompts that "
            f"are different and at most {self._max_prompt_tokens} tokens long; raise "
            "rollout.max_prompt_tokens, widen task.params, or ask for fewer prompts"
        )


def num_prompts(task: Task, split: Split) -> int | None:
    """Return how many prompts a finite task has in a split; None for one that makes them."""
    count = getattr(task, "num_prompts", None)
    return None if count is None else count(split)
