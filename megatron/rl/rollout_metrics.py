# SPDX-License-Identifier: Apache-2.0
"""Metrics of a rollout batch and of an evaluation, from the reports of all engines."""

from collections.abc import Sequence

import numpy as np

from megatron.rl.exchange import SequenceTable
from megatron.rl.sampler import SampleReport


def rollout_metrics(reports: Sequence[SampleReport]) -> dict[str, float]:
    """Return the metrics of a rollout batch; times are those of the slowest engine."""
    table = SequenceTable.join([report.table for report in reports])
    lengths = table.response_lengths
    rollout_s = max(report.rollout_s for report in reports)
    return {
        "reward": float(table.rewards.mean()),
        "reward_std": float(table.rewards.std()),
        "reward_failures": sum(report.reward_failures for report in reports),
        "groups_without_signal": _constant_groups(table.rewards, table.group),
        "response_length": float(lengths.mean()),
        "response_length_max": int(lengths.max()),
        "truncated": float(1 - table.finished.mean()),
        "response_tokens": int(lengths.sum()),
        "prompts_dropped": reports[0].dropped,
        "policy_version": int(table.versions.max()),
        "time/rollout_s": rollout_s,
        "time/reward_s": max(report.reward_s for report in reports),
        "tokens_per_s/rollout": int(lengths.sum()) / rollout_s,
    }


def heldout_metrics(reports: Sequence[SampleReport]) -> dict[str, float]:
    """Return the mean reward on the held-out prompts, and its standard error."""
    table = SequenceTable.join([report.table for report in reports])
    return {
        "heldout_reward": float(table.rewards.mean()),
        "heldout_reward_stderr": float(table.rewards.std() / np.sqrt(len(table))),
        "heldout_response_length": float(table.response_lengths.mean()),
    }


def _constant_groups(rewards: np.ndarray, group: np.ndarray) -> float:
    """Share of groups whose rewards are all equal, which teach nothing."""
    names, index = np.unique(group, return_inverse=True)
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, index, rewards)
    np.maximum.at(high, index, rewards)
    return float((low == high).mean())
