# SPDX-License-Identifier: Apache-2.0
"""Metrics of a rollout batch and of an evaluation, from the reports of all engines."""

from collections.abc import Sequence

import numpy as np

from megatron.rl.batch_draft import BatchReport, PartTotal, RoundReport
from megatron.rl.config import Config
from megatron.rl.exchange import SequenceTable
from megatron.rl.sampler import SampleReport


def mean_reward(reports: Sequence[BatchReport]) -> float:
    """Return the mean reward of all that was sampled for a rollout batch; 0 for nothing."""
    rewards = _sampled_table(reports).rewards
    return float(rewards.mean()) if len(rewards) else 0.0


def rollout_metrics(reports: Sequence[BatchReport], config: Config) -> dict[str, float]:
    """Return the metrics of a rollout batch; times are those of the slowest engine.

    What describes the policy (reward, lengths) is over all that was sampled: groups that dynamic
    sampling drops would bias it. Parts of the reward come where terms are on, ``refill/*`` with
    dynamic sampling, ``overlong_filtered`` with the filter.
    """
    table = _sampled_table(reports)
    rounds = [this for report in reports for this in report.rounds]
    groups = len(table) // config.rollout.group_size
    teaching = sum(this.groups_that_teach for this in rounds)
    lengths = table.response_lengths
    rollout_s = max(sum(this.rollout_s for this in report.rounds) for report in reports)
    reward_s = max(sum(this.reward_s for this in report.rounds) for report in reports)
    if not groups:  # the replay of a batch in which nothing was trained on
        return {"reward": 0.0, "response_tokens": 0} | _refill_metrics(reports, 0, 0)
    metrics = {
        "reward": float(table.rewards.mean()),
        "reward_std": float(table.rewards.std()),
        "reward_failures": sum(this.reward_failures for this in rounds),
        "reward_timeouts": sum(this.reward_timeouts for this in rounds),
        "groups_without_signal": (groups - teaching) / groups,
        "response_length": float(lengths.mean()),
        "response_length_max": int(lengths.max()),
        "truncated": float(1 - table.finished.mean()),
        "response_tokens": int(lengths.sum()),
        "prompts_dropped": sum(this.dropped for this in reports[0].rounds),
        "policy_version": int(table.versions.max()),
        "time/rollout_s": rollout_s,
        "time/reward_s": reward_s,
        "tokens_per_s/rollout": int(lengths.sum()) / rollout_s,
    }
    if config.reward.terms:
        metrics |= _reward_parts(rounds, len(table))
    trained_on = SequenceTable.join([report.table for report in reports])
    if config.rollout.refill_rounds:
        metrics |= _refill_metrics(reports, groups, len(trained_on) // config.rollout.group_size)
    if config.train.overlong_filter:
        metrics["overlong_filtered"] = int((~trained_on.in_loss).sum())
    return metrics


def _sampled_table(reports: Sequence[BatchReport]) -> SequenceTable:
    return SequenceTable.join([this.sampled for report in reports for this in report.rounds])


def _reward_parts(rounds: Sequence[RoundReport], responses: int) -> dict[str, float]:
    """``reward/<part>``, the mean, and ``reward/<part>_count``, of responses where it is not 0."""
    metrics: dict[str, float] = {}
    for name in rounds[0].reward_parts:
        total = PartTotal.add([this.reward_parts[name] for this in rounds])
        metrics[f"reward/{name}"] = total.total / responses
        metrics[f"reward/{name}_count"] = total.count
    return metrics


def _refill_metrics(reports: Sequence[BatchReport], sampled: int, trained: int) -> dict[str, float]:
    return {
        "refill/rounds": len(reports[0].rounds) - 1,
        "refill/sampled_prompts": sampled,
        "refill/trained_prompts": trained,
        "refill/dropped_groups": sampled - trained,
    }


def heldout_metrics(reports: Sequence[SampleReport]) -> dict[str, float]:
    """Return the mean reward on the held-out prompts, and its standard error."""
    table = SequenceTable.join([report.table for report in reports])
    return {
        "heldout_reward": float(table.rewards.mean()),
        "heldout_reward_stderr": float(table.rewards.std() / np.sqrt(len(table))),
        "heldout_response_length": float(table.response_lengths.mean()),
    }
