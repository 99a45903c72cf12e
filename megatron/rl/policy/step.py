# SPDX-License-Identifier: Apache-2.0
"""One optimizer step through Megatron's own schedule: forward, backward, finalize, step."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron.rl.batch import MicroBatch
from megatron.rl.policy.head import HeadContext, PolicyHead, TokenRecord

# What the schedule's caller is told of a micro-batch: its loss, and what the head left behind.
Report = Callable[[Tensor, HeadContext], dict[str, Tensor]]


def _no_report(loss: Tensor, context: HeadContext) -> dict[str, Tensor]:
    return {}


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    head: PolicyHead,
    micro_batches: Sequence[MicroBatch],
    *,
    forward_only: bool = False,
    losses: list[Tensor] | None = None,
) -> list[TokenRecord]:
    """Run every micro-batch through Megatron's schedule; gradients end up in ``main_grad``.

    With ``calculate_per_token_loss`` the schedule sums losses and token counts, and
    ``finalize_model_grads`` divides the gradients once by the global count.

    Args:
        chunks: this rank's part of the model, each wrapped in DistributedDataParallel; several
            take the interleaved schedule.
        micro_batches: as many on every rank; with several chunks a multiple of the pipeline size.
        losses: receives each micro-batch's summed loss, where a record is returned.

    Returns:
        One record a micro-batch on the last pipeline stage, an empty list elsewhere.
    """
    records: list[TokenRecord] = []
    get_forward_backward_func()(
        forward_step_func=partial(
            forward_step, head=head, records=records, losses=[] if losses is None else losses
        ),
        # Every chunk reads every micro-batch, the middle ones for its sequence lengths.
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Real lengths vary and are exchanged between stages (variable_seq_lengths).
        seq_length=max(batch.num_input_tokens for batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return records


def forward_step(
    data_iterator: Iterator[MicroBatch],
    model: GPTModel,
    *,
    head: PolicyHead,
    records: list[TokenRecord],
    losses: list[Tensor],
    report: Report = _no_report,
) -> tuple[Tensor, Any]:
    """Run the next micro-batch through the model: Megatron's ``forward_step_func``.

    Args:
        head: turns hidden states into the micro-batch's summed loss, the model's output.
        records, losses: receive the head's record and the loss, detached, when the loss is read,
            on the last pipeline stage.
        report: what the schedule collects for its caller, a dictionary a micro-batch.

    Returns:
        The model's output, and the function that reads the loss from it: the sum over tokens, the
        number of tokens, and the report.
    """
    batch = next(data_iterator)
    context = HeadContext(batch)
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packing,
        output_processor=head,
        output_processor_context=context,
    )
    return output, partial(
        _sum_loss, context=context, records=records, losses=losses, report=report
    )


def _sum_loss(
    loss: Tensor,
    *,
    context: HeadContext,
    records: list[TokenRecord],
    losses: list[Tensor],
    report: Report,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    assert context.num_tokens is not None and context.record is not None
    records.append(context.record)
    losses.append(loss.detach())
    return loss, context.num_tokens, report(loss, context)
