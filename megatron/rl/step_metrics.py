# SPDX-License-Identifier: Apache-2.0
"""The metrics of one optimizer step, over all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.rl.metrics import gather_records, loss_metrics, staleness_metrics
from megatron.rl.mismatch import MismatchSplit
from megatron.rl.policy.head import TokenRecord
from megatron.rl.policy.model import is_last_stage


def step_metrics(
    records: Sequence[TokenRecord], losses: Sequence[Tensor], split: MismatchSplit
) -> dict[str, Any]:
    """Compute them on the last pipeline stage and give them to the others. Collective.

    Args:
        records, losses: one a micro-batch, on the last pipeline stage.
        split: of the batch; counts the step.
    """
    metrics: list[dict[str, Any]] = [{}]
    if is_last_stage():
        tokens = gather_tokens(records)
        steps = split.steps_measured
        metrics[0] = loss_metrics(tokens) | split.measure(tokens)
        metrics[0] |= staleness_metrics(tokens, split.version, steps)
        metrics[0]["loss"] = _mean_loss(losses, tokens.sequence.numel())
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(metrics, src=last, group=group)
    return metrics[0]


def gather_tokens(records: Sequence[TokenRecord]) -> TokenRecord:
    """Return the tokens of all data-parallel ranks. Collective over the last pipeline stage."""
    return gather_records(records, _data_group())


def _mean_loss(losses: Sequence[Tensor], num_tokens: int) -> float:
    """Return what the optimizer step minimised: the sum over all ranks, divided once."""
    total = torch.stack(list(losses)).double().sum()
    dist.all_reduce(total, group=_data_group())
    return float(total) / max(num_tokens, 1)


def _data_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group
