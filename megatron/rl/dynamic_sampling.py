# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: which prompts of the stream are sampled in which round, by which engine.

A group *teaches* when the task's scores of its responses differ and a response that the loss counts
has an advantage. Groups that do not are replaced by further prompts of the stream, round by round.
The numbers of prompts in a round follow from what all engines report, so that every rank works out
the same rounds and draws the stream alike.

Source: Yu et al., 2025 (DAPO, arXiv 2503.14476), section 3.2, which keeps a prompt if some of its
responses are right and some are wrong. It is the scores that decide, not the rewards: where only
shaping terms differ, normalising by the group's deviation would blow them up to a full advantage.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.rl.rollout.topology import PromptShare


@dataclass(frozen=True)
class SamplingRound:
    """One round of sampling for a rollout batch.

    Attributes:
        number: 0 for the batch itself, from 1 on for what replaces its groups.
        first_prompt: prompts that the rounds before have drawn for this batch. It enters the
            seeds: they follow from a sequence's number among all that are sampled for the batch.
        edges: engine e samples prompts ``[edges[e], edges[e + 1])`` of the round, perhaps none.
    """

    number: int
    first_prompt: int
    edges: tuple[int, ...]

    @classmethod
    def first(cls, wanted: Sequence[int]) -> "SamplingRound":
        """The round that samples as many prompts as each engine is to contribute."""
        return cls(0, 0, _edges(wanted))

    def following(self, missing: Sequence[int]) -> "SamplingRound":
        """The round behind this one, which samples what each engine still misses."""
        return SamplingRound(self.number + 1, self.first_prompt + self.num_prompts, _edges(missing))

    @property
    def num_prompts(self) -> int:
        """Prompts that are drawn from the stream, over all engines."""
        return self.edges[-1]

    def share(self, engine: int) -> PromptShare:
        """What an engine samples."""
        return PromptShare(self.edges[engine], self.edges[engine + 1])


def sample_rounds(
    wanted: Sequence[int],
    refills: int,
    sample: Callable[[SamplingRound], Sequence[int]],
) -> NDArray[np.int64]:
    """Sample until every engine has its groups, or ``refills`` rounds behind the first are over.

    Args:
        wanted: groups that each engine is to contribute.
        sample: samples a round; returns how many usable groups each engine found in it. Collective.

    Returns:
        How many each engine has, at most as many as were wanted.
    """
    found = np.zeros(len(wanted), dtype=np.int64)
    this = SamplingRound.first(wanted)
    while True:
        found += np.asarray(sample(this), dtype=np.int64)
        missing = np.asarray(wanted) - found
        if this.number == refills or not missing.any():
            return found
        this = this.following(missing.tolist())


def teaching_groups(
    scores: NDArray[np.float64],
    advantages: NDArray[np.float64],
    in_loss: NDArray[np.bool_],
    samples: int,
) -> NDArray[np.bool_]:
    """Return which groups teach, bool [P]: see the module's text.

    Args:
        scores, advantages, in_loss: [P * samples], group after group.
    """
    by_group = scores.reshape(-1, samples)
    differ = by_group.max(axis=1) > by_group.min(axis=1)
    counted = ((advantages != 0) & in_loss).reshape(-1, samples).any(axis=1)
    return np.asarray(differ & counted)


def _edges(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(counts, initial=0))
