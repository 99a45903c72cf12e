# SPDX-License-Identifier: Apache-2.0
"""Whole groups of responses that one engine sampled, with what training needs of them."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.rl.exchange import SequenceTable, TopKForm
from megatron.rl.rewards.reward_terms import ShapedRewards
from megatron.rl.rollout.records.record import Record, RecordInfo, group_index
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns


@dataclass(frozen=True)
class SampledGroups:
    """P groups of G responses each, B = P * G sequences, group after group.

    prompts      P arrays of int32, the prompts' tokens
    prompt_ids   [P] int64
    rollouts     B responses; ``prompt_index`` counts the groups here
    rewards      of B responses
    advantages   [B] float32, relative to the group
    in_loss      [B] bool, whether the loss counts a response
    teaches      [P] bool, see dynamic_sampling.py
    """

    prompts: tuple[NDArray[np.int32], ...]
    prompt_ids: NDArray[np.int64]
    rollouts: Rollouts
    rewards: ShapedRewards
    advantages: NDArray[np.float32]
    in_loss: NDArray[np.bool_]
    teaches: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def none(cls, form: TopKForm, terms: Sequence[str]) -> "SampledGroups":
        """No groups.

        Args:
            form: of the top-K columns.
            terms: names of the reward terms that are on.
        """
        ints, flags = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
        rollouts = Rollouts(
            prompt_index=ints,
            response_tokens=ints,
            response_offsets=np.zeros(1, dtype=np.int64),
            log_probs=np.zeros(0, dtype=np.float32),
            topk=TopKColumns.empty(form.vocab_size, form.k, form.precision),
            policy_versions=ints,
            finished=flags,
            aborted=flags,
            generation_s=0.0,
        )
        rewards = ShapedRewards(np.zeros(0), {name: np.zeros(0) for name in terms})
        advantages = np.zeros(0, dtype=np.float32)
        return cls((), np.zeros(0, dtype=np.int64), rollouts, rewards, advantages, flags, flags)

    @property
    def samples(self) -> int:
        """Responses of each group; 1 without groups."""
        return len(self.in_loss) // len(self) if self.prompts else 1

    def select(self, groups: NDArray[np.integer]) -> "SampledGroups":
        """Some of the groups, in this order; itself where that is all of them."""
        if np.array_equal(groups, np.arange(len(self))):
            return self
        rows = (groups[:, None] * self.samples + np.arange(self.samples)).reshape(-1)
        return SampledGroups(
            tuple(self.prompts[group] for group in groups),
            self.prompt_ids[groups],
            _regrouped(self.rollouts.select(rows), len(groups)),
            self.rewards.select(rows),
            self.advantages[rows],
            self.in_loss[rows],
            self.teaches[groups],
        )

    @classmethod
    def join(cls, parts: "Sequence[SampledGroups]") -> "SampledGroups":
        """The groups of all parts, one part after the other; at least one part."""
        if len(parts) == 1:
            return parts[0]
        rollouts = [part.rollouts for part in parts]
        joined = Rollouts.concatenate(rollouts, sum(r.generation_s for r in rollouts))
        return cls(
            tuple(itertools.chain.from_iterable(part.prompts for part in parts)),
            np.concatenate([part.prompt_ids for part in parts]),
            _regrouped(joined, sum(len(part) for part in parts)),
            ShapedRewards.join([part.rewards for part in parts]),
            np.concatenate([part.advantages for part in parts]),
            np.concatenate([part.in_loss for part in parts]),
            np.concatenate([part.teaches for part in parts]),
        )

    def table(self) -> SequenceTable:
        """What every rank is told of these sequences."""
        rollouts = self.rollouts
        versions = [
            rollouts.policy_versions[first:last].max(initial=-1)
            for first, last in itertools.pairwise(rollouts.response_offsets)
        ]
        prompt_lengths = np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)
        return SequenceTable(
            group=np.repeat(self.prompt_ids, self.samples),
            prompt_lengths=np.repeat(prompt_lengths, self.samples),
            response_lengths=rollouts.lengths,
            rewards=self.rewards.rewards,
            advantages=self.advantages,
            finished=rollouts.finished,
            versions=np.array(versions, dtype=np.int32),
            in_loss=self.in_loss,
        )

    def record(self, info: RecordInfo) -> Record:
        """These sequences as a record."""
        asked = [prompt for prompt in self.prompts for _ in range(self.samples)]
        return Record(
            info,
            prompt_tokens=np.concatenate([np.zeros(0, dtype=np.int32), *asked]),
            prompt_offsets=np.cumsum([0, *(len(tokens) for tokens in asked)]),
            prompt_ids=np.repeat(self.prompt_ids, self.samples),
            rewards=self.rewards.rewards,
            advantages=self.advantages,
            rollouts=self.rollouts,
        )


def _regrouped(rollouts: Rollouts, groups: int) -> Rollouts:
    samples = rollouts.num_sequences // groups if groups else 1
    index = group_index(rollouts.num_sequences, samples)
    return dataclasses.replace(rollouts, prompt_index=index)
