# SPDX-License-Identifier: Apache-2.0
"""Metrics of an optimizer step, over the tokens of the whole global batch.

Means are over global token or sequence counts, never means of micro-batch means. pi is the policy
at the time of the step, mu the behavior policy that the engine reported. What lies between the two,
by cause, is in ``mismatch.py``.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.rl.policy.head import TokenRecord

DIVERGENCE_QUANTILES = (0.5, 0.9, 0.99)
# Longest response of each bucket of the acceptance by length; the last bucket is open.
ACCEPTANCE_LENGTHS = (64, 256, 1024, 4096)
# Versions; older tokens are counted together.
LONGEST_LAG = 8


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
    quantiles = _quantiles(divergence, DIVERGENCE_QUANTILES)
    metrics = {
        "ppo_kl": -log_ratio.mean(),
        "clip_fraction": vetoed.double().mean(),
        "outside_fraction": tokens.outside.double().mean(),
        "outward_fraction": tokens.outward.double().mean(),
        "ppl_gap": sequence_means(log_ratio, tokens.sequence).mean(),
        "entropy": tokens.entropy.double().mean(),
        "ratio/max": log_ratio.max().exp(),
        "ratio/min": log_ratio.min().exp(),
        "divergence/mean": divergence.mean(),
        "divergence/max": divergence.max(),
        # prime-rl's names: vetoed with a probability below, or above, that of the engine.
        "is_masked_low": (vetoed & (log_ratio < 0)).double().mean(),
        "is_masked_high": (vetoed & (log_ratio > 0)).double().mean(),
    }
    if tokens.certified is not None:
        metrics["certified_fraction"] = tokens.certified.double().mean()
    if tokens.accepted is not None:
        metrics |= _acceptance(tokens.accepted, tokens.sequence)
    for q, value in zip(DIVERGENCE_QUANTILES, quantiles, strict=True):
        metrics[f"divergence/p{q * 100:g}"] = value
    return to_floats(metrics) | {
        "tokens": tokens.sequence.numel(),
        "vetoed_tokens": int(vetoed.sum()),
    }


def staleness_metrics(tokens: TokenRecord, version: int, optimizer_steps: int) -> dict[str, float]:
    """Return how old the weights are that sampled the tokens.

    - ``staleness/mean``, ``staleness/max`` of the lag: ``version`` less that of the token
    - ``staleness/lag_<n>``: the share of tokens with that lag; the last counts all above it too
    - ``staleness/optimizer_steps``: those that the policy took since it had ``version``

    Args:
        version: of the weights that the engine was given last.
        optimizer_steps: taken since.
    """
    if tokens.sequence.numel() == 0:
        return {}
    lag = version - tokens.policy_version
    metrics: dict[str, float] = {
        "staleness/mean": float(lag.double().mean()),
        "staleness/max": int(lag.max()),
        "staleness/optimizer_steps": optimizer_steps,
    }
    lags, counts = torch.unique(lag.clamp_max(LONGEST_LAG), return_counts=True)
    for value, count in zip(lags.tolist(), counts.tolist(), strict=True):
        suffix = "_or_more" if value == LONGEST_LAG else ""
        metrics[f"staleness/lag_{value}{suffix}"] = count / lag.numel()
    return metrics


def to_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Bring scalars to the host, all at once."""
    values = torch.stack([value.double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def sequence_means(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the mean of each sequence's tokens, by ascending number of the sequence."""
    numbers, index, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(numbers)).index_add_(0, index, values)
    return sums / counts


def _quantiles(values: Tensor, shares: Sequence[float]) -> Tensor:
    """Linear between neighbours, as torch.quantile, which takes at most 16 million values."""
    ascending = values.sort().values
    place = values.new_tensor(shares) * (len(values) - 1)
    below = place.floor().long()
    above = (below + 1).clamp_max(len(values) - 1)
    return torch.lerp(ascending[below], ascending[above], place - below)


def _acceptance(accepted: Tensor, sequence: Tensor) -> dict[str, Tensor]:
    """Share of accepted sequences, over all and by response length."""
    verdict = sequence_means(accepted.double(), sequence)
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
