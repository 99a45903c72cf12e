# SPDX-License-Identifier: Apache-2.0
"""The policy head: hidden states to masked loss, inside Megatron's ``output_processor`` hook.

``GPTModel.forward`` (gpt_model.py:719) hands the last stage's hidden states and its output layer to
``output_processor`` and returns what that returns. This head computes logits for the response
tokens only, takes their statistics over the vocabulary shards, applies the mask and returns the
loss as the model's output: full logits are never gathered.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron.rl.batch import MicroBatch
from pdm import PolicyLossConfig, VocabShard, policy_loss, policy_statistics


@dataclass(frozen=True)
class TokenRecord:
    """What one micro-batch's loss saw, per response token ``[N]``, detached, for metrics."""

    sequence: Tensor
    behavior_log_prob: Tensor
    policy_log_prob: Tensor
    advantages: Tensor
    divergence: Tensor
    entropy: Tensor
    outside: Tensor
    outward: Tensor
    keep: Tensor


@dataclass
class HeadContext:
    """Passes one micro-batch into the head and its record out; one object a micro-batch."""

    batch: MicroBatch
    num_tokens: Tensor | None = None
    record: TokenRecord | None = None


@dataclass(frozen=True)
class ReferenceHead:
    """The loss of DESIGN section 7 through plain autograd: logits of the rows, then the mask.

    It materialises ``[N, V / TP]`` logits of one micro-batch, in ``logits_dtype``.

    Attributes:
        loss: which mask, and how tokens are weighted.
        vocab_size: the true vocabulary size; padded rows of the head are left out.
        temperature: both sides score with logits / temperature.
        logits_dtype: dtype of the head's matrix product.
    """

    loss: PolicyLossConfig
    vocab_size: int
    temperature: float
    logits_dtype: torch.dtype = torch.float32

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: HeadContext,
        **unused: Any,
    ) -> Tensor:
        """Return sum_t w_t * loss_t over the micro-batch's response tokens, a scalar.

        Args:
            hidden_states: ``[T / TP, 1, H]`` with sequence parallelism, else ``[T, 1, H]``.
            output_layer: holds this rank's rows ``[V / TP, H]`` unless ``output_weight`` does.
            output_weight: the tied embedding's rows, or None.
            context: the micro-batch; receives the token count and the record.
        """
        weight = output_weight if output_weight is not None else output_layer.weight
        hidden = _whole_hidden(hidden_states, output_layer.sequence_parallel)
        batch = context.batch
        rows = hidden.flatten(0, 1).index_select(0, batch.rows)
        logits = torch.nn.functional.linear(
            rows.to(self.logits_dtype), weight.to(self.logits_dtype)
        )
        stats = policy_statistics(
            logits, batch.support, temperature=self.temperature, shard=self._shard(weight)
        )
        result = policy_loss(
            stats, batch.support, batch.advantages, self.loss, weights=batch.weights
        )
        # Megatron adds token counts into an int tensor (schedules.py:802).
        context.num_tokens = result.num_tokens.to(torch.int)
        context.record = TokenRecord(
            sequence=batch.sequence,
            behavior_log_prob=batch.support.sampled_log_probs,
            policy_log_prob=stats.log_prob.detach(),
            advantages=batch.advantages,
            divergence=result.divergence,
            entropy=stats.entropy.detach(),
            outside=result.mask.outside,
            outward=result.mask.outward,
            keep=result.mask.keep,
        )
        return result.loss

    def _shard(self, weight: Tensor) -> VocabShard:
        group = parallel_state.get_tensor_model_parallel_group()
        start = group.rank() * weight.size(0)
        return VocabShard(
            start, start + weight.size(0), self.vocab_size, group if group.size() > 1 else None
        )


def _whole_hidden(hidden: Tensor, sequence_parallel: bool) -> Tensor:
    """Return all tokens' hidden states, whose gradient is summed over tensor-parallel ranks.

    Each rank multiplies with its own rows of the head, so that its hidden gradient is a partial
    sum: reduce-scattered under sequence parallelism, all-reduced otherwise.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return copy_to_tensor_model_parallel_region(hidden)
