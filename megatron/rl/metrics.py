# SPDX-License-Identifier: Apache-2.0
"""Metrics of an optimizer step, over the tokens of the whole global batch.

Means are over global token or sequence counts, never means of micro-batch means. pi is the policy
at the time of the step, mu the behavior policy that the engine reported; l = log pi - log mu of a
sampled token. Names that users of other trainers look for are logged beside ours:
``rollout_corr/*`` and ``training/rollout_probs_diff_*`` (verl), ``token_mult_prob_error`` and
``gen_kl_error`` (NeMo-RL), ``mismatch_kl/*`` and ``is_masked_*`` (prime-rl), ``actor/topk_kl_*``
(Stable-RL).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.rl.policy.head import TokenRecord

DIVERGENCE_QUANTILES = (0.5, 0.9, 0.99)
# Longest response of each bucket of the acceptance by length; the last bucket is open.
ACCEPTANCE_LENGTHS = (64, 256, 1024, 4096)


def gather_records(
    records: Sequence[TokenRecord], data_group: dist.ProcessGroup | None
) -> TokenRecord:
    """Join the records of a rank's micro-batches, and those of all data-parallel ranks.

    Collective over ``data_group``; call it on the last pipeline stage only.
    """
    names = [f.name for f in dataclasses.fields(TokenRecord)]
    absent: dict[str, Any] = {name: None for name in names if getattr(records[0], name) is None}
    joined = {
        name: torch.cat([getattr(record, name) for record in records])
        for name in names
        if name not in absent
    }
    if data_group is None or data_group.size() == 1:
        return TokenRecord(**joined, **absent)
    # One float64 table: ids below 2**53 and booleans survive it, and one collective does.
    table = torch.stack([column.to(torch.float64) for column in joined.values()])
    counts = [
        torch.zeros(1, dtype=torch.int64, device=table.device) for _ in range(data_group.size())
    ]
    dist.all_gather(counts, counts[0].new_tensor([table.size(1)]), group=data_group)
    longest = int(max(counts))
    padded = table.new_zeros(table.size(0), longest)
    padded[:, : table.size(1)] = table
    tables = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(tables, padded, group=data_group)
    whole = torch.cat([t[:, : int(n)] for t, n in zip(tables, counts, strict=True)], dim=1)
    columns = zip(joined.items(), whole, strict=True)
    return TokenRecord(**{name: new.to(old.dtype) for (name, old), new in columns}, **absent)


def loss_metrics(tokens: TokenRecord) -> dict[str, float]:
    """Return the metrics of the loss and its mask.

    - ``ppo_kl`` = mean(log mu - log pi) over response tokens
    - ``clip_fraction`` = vetoed / response tokens; ``outside_fraction``, ``outward_fraction``
    - ``ppl_gap`` = mean over sequences of (mean log pi - mean log mu)
    - ``divergence/*``: mean, quantiles and maximum of the gating divergence D
    - ``entropy`` in nats; ``ratio/*`` of pi to mu
    - ``certified_fraction`` with ``direction: certified``; ``sequence_acceptance`` and the same by
      response length with a sequence mask
    """
    if tokens.sequence.numel() == 0:
        return {}
    log_ratio = _log_ratio(tokens)
    vetoed = ~tokens.keep
    divergence = tokens.divergence.double()
    quantiles = torch.quantile(divergence, divergence.new_tensor(DIVERGENCE_QUANTILES))
    metrics = {
        "ppo_kl": -log_ratio.mean(),
        "clip_fraction": vetoed.double().mean(),
        "outside_fraction": tokens.outside.double().mean(),
        "outward_fraction": tokens.outward.double().mean(),
        "ppl_gap": -_log_ppl_difference(tokens).mean(),
        "entropy": tokens.entropy.double().mean(),
        "ratio/max": log_ratio.max().exp(),
        "ratio/min": log_ratio.min().exp(),
        "divergence/mean": divergence.mean(),
        "divergence/max": divergence.max(),
        "actor/topk_kl_mean": divergence.mean(),
        "actor/topk_kl_max": divergence.max(),
        "is_masked_low": (vetoed & (log_ratio < 0)).double().mean(),
        "is_masked_high": (vetoed & (log_ratio > 0)).double().mean(),
    }
    if tokens.certified is not None:
        metrics["certified_fraction"] = tokens.certified.double().mean()
    if tokens.accepted is not None:
        metrics |= _acceptance(tokens.accepted, tokens.sequence)
    for q, value in zip(DIVERGENCE_QUANTILES, quantiles, strict=True):
        metrics[f"divergence/p{q * 100:g}"] = value
    return {name: float(value) for name, value in metrics.items()} | {
        "tokens": tokens.sequence.numel(),
        "vetoed_tokens": int(vetoed.sum()),
    }


def mismatch_metrics(tokens: TokenRecord) -> dict[str, float]:
    """Return how far trainer and engine disagree about the same weights.

    Meant for the first optimizer step of a rollout batch, where pi has the weights that sampled.
    """
    if tokens.sequence.numel() == 0:
        return {}
    log_ratio = _log_ratio(tokens)
    k3 = torch.expm1(log_ratio) - log_ratio
    policy, behavior = tokens.policy_log_prob.double(), tokens.behavior_log_prob.double()
    prob_difference = (policy.exp() - behavior.exp()).abs()
    policy_log_ppl = -_sequence_means(policy, tokens.sequence)
    behavior_log_ppl = -_sequence_means(behavior, tokens.sequence)
    metrics = {
        "mismatch/log_prob_max": log_ratio.abs().max(),
        "mismatch/log_prob_mean": log_ratio.abs().mean(),
        "rollout_corr/kl": -log_ratio.mean(),
        "rollout_corr/k3_kl": k3.mean(),
        "rollout_corr/training_ppl": policy_log_ppl.exp().mean(),
        "rollout_corr/rollout_ppl": behavior_log_ppl.exp().mean(),
        "rollout_corr/log_ppl_diff": (policy_log_ppl - behavior_log_ppl).mean(),
        "rollout_corr/chi2_token": (2 * log_ratio).exp().mean() - 1,
        "training/rollout_probs_diff_max": prob_difference.max(),
        "training/rollout_probs_diff_mean": prob_difference.mean(),
        "training/rollout_probs_diff_std": prob_difference.std(correction=0),
        "token_mult_prob_error": log_ratio.abs().exp().mean(),
        "gen_kl_error": k3.mean(),
        "mismatch_kl/mean": k3.mean(),
        "mismatch_kl/max": k3.max(),
    }
    return {name: float(value) for name, value in metrics.items()}


def _acceptance(accepted: Tensor, sequence: Tensor) -> dict[str, Tensor]:
    """Share of accepted sequences, over all and by response length."""
    verdict = _sequence_means(accepted.double(), sequence)
    lengths = torch.unique(sequence, return_counts=True)[1]
    metrics = {"sequence_acceptance": verdict.mean()}
    edges = (0, *ACCEPTANCE_LENGTHS, math.inf)
    for low, high in itertools.pairwise(edges):
        inside = (lengths > low) & (lengths <= high)
        if inside.any():
            metrics[f"sequence_acceptance/up_to_{high:g}"] = verdict[inside].mean()
    return metrics


def _log_ratio(tokens: TokenRecord) -> Tensor:
    return tokens.policy_log_prob.double() - tokens.behavior_log_prob.double()


def _log_ppl_difference(tokens: TokenRecord) -> Tensor:
    """log perplexity of pi minus that of mu, per sequence."""
    return -_sequence_means(_log_ratio(tokens), tokens.sequence)


def _sequence_means(values: Tensor, sequence: Tensor) -> Tensor:
    numbers, index, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    return (
        torch.zeros(len(numbers), dtype=values.dtype, device=values.device).index_add(
            0, index, values
        )
        / counts
    )
