# SPDX-License-Identifier: Apache-2.0
"""One engine's share of a rollout batch while it is sampled, round by round, and what it became."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.rl.exchange import SequenceTable
from megatron.rl.sampled_groups import SampledGroups


@dataclass(frozen=True)
class PartTotal:
    """A part of the reward over many responses.

    total: the sum over them. count: of those for which it is not 0.
    """

    total: float
    count: int

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "PartTotal":
        """The total of ``[B]`` values, one a response."""
        return cls(float(values.sum()), int(np.count_nonzero(values)))

    @classmethod
    def add(cls, totals: "Sequence[PartTotal]") -> "PartTotal":
        """The total over several lots of responses."""
        return cls(sum(part.total for part in totals), sum(part.count for part in totals))


@dataclass(frozen=True)
class RoundReport:
    """What an engine did in one round.

    Attributes:
        sampled: all sequences of the round.
        groups_that_teach: of the sampled ones.
        reward_parts: ``score``, and each term that is on, over all sampled responses.
        reward_failures: responses that could not be scored.
        reward_timeouts: of them, those whose scorer ran out of time.
        dropped: prompts of the whole round that were skipped for their length.
        rollout_s: seconds until all was sampled.
        reward_s: seconds of scoring, most of them before that, while others were being sampled.
    """

    sampled: SequenceTable
    groups_that_teach: int
    reward_parts: Mapping[str, PartTotal]
    reward_failures: int
    reward_timeouts: int
    dropped: int
    rollout_s: float
    reward_s: float

    @classmethod
    def of(
        cls,
        groups: SampledGroups,
        *,
        reward_failures: int,
        reward_timeouts: int,
        dropped: int,
        rollout_s: float,
        reward_s: float,
    ) -> "RoundReport":
        """The report on some groups, which are all of the round; see the attributes."""
        values = {"score": groups.rewards.scores, **groups.rewards.terms}
        return cls(
            sampled=groups.table(),
            groups_that_teach=int(groups.teaches.sum()),
            reward_parts={name: PartTotal.of(part) for name, part in values.items()},
            reward_failures=reward_failures,
            reward_timeouts=reward_timeouts,
            dropped=dropped,
            rollout_s=rollout_s,
            reward_s=reward_s,
        )


@dataclass(frozen=True)
class BatchReport:
    """What all ranks learn of an engine's share of a rollout batch.

    Attributes:
        table: the sequences that are trained on.
        rounds: in order, those without a part of this engine included; at least one.
    """

    table: SequenceTable
    rounds: Sequence[RoundReport]


class BatchDraft:
    """Collects the rounds of one engine.

    Args:
        refills: whether groups that do not teach are replaced, instead of being trained on.
        fills_up: whether such groups are trained on after all where others are missing.
    """

    def __init__(self, *, refills: bool, fills_up: bool) -> None:
        self._refills = refills
        self._fills_up = fills_up
        self._kept: list[SampledGroups] = []
        self._others: list[SampledGroups] = []
        self._rounds: list[RoundReport] = []

    def add(self, groups: SampledGroups, report: RoundReport) -> int:
        """Take a round in; return how many of its groups can be trained on."""
        self._rounds.append(report)
        if self._refills:
            if self._fills_up:
                self._others.append(groups.select(np.flatnonzero(~groups.teaches)))
            groups = groups.select(np.flatnonzero(groups.teaches))
        self._kept.append(groups)
        return len(groups)

    def take(self, count: int) -> SampledGroups:
        """Return the first ``count`` groups: those that teach, then others if these are too few."""
        parts = [part for part in (*self._kept, *self._others) if len(part)]
        return SampledGroups.join(parts or self._kept[:1]).select(np.arange(count))

    def report(self, trained_on: SampledGroups) -> BatchReport:
        """Return what the other ranks are told, ``trained_on`` being what :meth:`take` gave."""
        return BatchReport(trained_on.table(), tuple(self._rounds))
