# SPDX-License-Identifier: Apache-2.0
"""Who trains on what in one pass over a rollout batch; every rank works it out alike."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron.rl.batch import IntArray, MinibatchSize, minibatches, plan_micro_batches
from megatron.rl.config import Config
from megatron.rl.exchange import SequenceTable

# Spreads a minibatch: from the input tokens of every sequence of the rollout batch and the members
# of the minibatch to the micro-batches of each data-parallel rank.
Planner = Callable[[IntArray, IntArray], list[list[IntArray]]]


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step.

    Attributes:
        micro_batches: for each data-parallel rank its micro-batches, each an array of sequence
            numbers of the rollout batch.
        size: of the whole minibatch.
    """

    micro_batches: list[list[IntArray]]
    size: MinibatchSize


@dataclass(frozen=True)
class EpochPlan:
    """One pass over a rollout batch.

    Attributes:
        steps: the optimizer steps, in order.
        replica: ``[B]``, the data-parallel rank that trains on each sequence; -1 for those that the
            loss does not count.
    """

    steps: list[PlannedStep]
    replica: IntArray


def plan_epoch(
    table: SequenceTable,
    config: Config,
    generator: np.random.Generator,
    planner: Planner | None = None,
) -> EpochPlan:
    """Draw the minibatches of an epoch and spread each over the data-parallel ranks.

    Sequences that the loss does not count are nobody's. A minibatch of such sequences alone is an
    optimizer step with micro-batches that are empty: gradients of 0, on every rank.

    Args:
        planner: spreads a minibatch; by default ``train.micro_batch_tokens`` limits micro-batches.
    """
    replica = np.full(len(table), -1)
    steps = []
    for members in minibatches(table.group, config.train.minibatch_prompts, generator):
        members = members[table.in_loss[members]]
        step = _plan_step(table, members, planner or _by_tokens(config))
        for rank, batches in enumerate(step.micro_batches):
            replica[np.concatenate(batches)] = rank
        steps.append(step)
    return EpochPlan(steps, replica)


def plan_scoring(table: SequenceTable, config: Config, replica: IntArray) -> PlannedStep:
    """Plan a pass over all that is trained on, by the ranks that have the sequences already."""
    return _plan_step(table, np.flatnonzero(table.in_loss), _by_tokens(config, replica))


def skip_epochs(prompts: int, generator: np.random.Generator, count: int) -> None:
    """Bring the generator where so many epochs over batches of so many prompts leave it."""
    for _ in range(count):
        generator.permutation(np.arange(prompts))


def _by_tokens(config: Config, replica: IntArray | None = None) -> Planner:
    return partial(
        plan_micro_batches,
        data_parallel=config.parallel.data,
        max_tokens=config.train.micro_batch_tokens,
        count_multiple=config.parallel.micro_batch_multiple,
        replica=replica,
    )


def _plan_step(table: SequenceTable, members: IntArray, planner: Planner) -> PlannedStep:
    micro_batches = planner(table.input_lengths, members)
    return PlannedStep(micro_batches, MinibatchSize.of(table.response_lengths[members]))
