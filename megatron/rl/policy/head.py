# SPDX-License-Identifier: Apache-2.0
"""The policy head: hidden states to masked loss, inside Megatron's ``output_processor`` hook.

``GPTModel.forward`` (gpt_model.py:719) hands the last stage's hidden states and its output layer to
``output_processor`` and returns what that returns. This head computes logits for the response
tokens only, takes their statistics over the vocabulary shards, applies the mask and returns the
loss as the model's output: full logits are never gathered.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron.rl.batch import MicroBatch
from pdm import (
    PolicyLossConfig,
    PolicyLossResult,
    PolicyStatistics,
    SequenceMaskConfig,
    VocabShard,
    accept_sequences,
    expand_to_tokens,
    fused_policy_loss,
    linear_policy_statistics,
    policy_loss,
    policy_statistics,
    sequence_mask,
    topk_kl,
    topk_tv,
)


@dataclass(frozen=True)
class TokenRecord:
    """What one micro-batch's loss saw, per response token ``[N]``, detached, for metrics."""

    sequence: Tensor
    """Number of the token's sequence within the rollout batch."""
    position: Tensor
    """Of the token within its response, from 0."""
    policy_version: Tensor
    """Of the weights that sampled the token."""
    behavior_log_prob: Tensor
    policy_log_prob: Tensor
    divergence: Tensor
    """The one that the loss is configured with."""
    topk_kl: Tensor
    """The top-K KL of the recorded support, whatever the loss is configured with."""
    entropy: Tensor
    outside: Tensor
    outward: Tensor
    keep: Tensor
    certified: Tensor | None
    """Tokens whose direction has a proven sign; only with ``direction: certified``."""
    accepted: Tensor | None
    """Tokens of accepted sequences; only with a sequence mask."""


@dataclass
class HeadContext:
    """Passes one micro-batch into the head and its record out; one object a micro-batch."""

    batch: MicroBatch
    num_tokens: Tensor | None = None
    record: TokenRecord | None = None


class PolicyHead(Protocol):
    """What ``output_processor`` calls: hidden states in, the micro-batch's summed loss out."""

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
        ...


@dataclass(frozen=True)
class FusedHead:
    """Statistics, mask and gradient in one pass over chunks of rows; see ``fused_policy_loss``.

    Attributes:
        loss: which mask, and how tokens are weighted.
        vocab_size: the true vocabulary size; padded rows of the head are left out.
        temperature: both sides score with logits / temperature.
    """

    loss: PolicyLossConfig
    vocab_size: int
    temperature: float

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: HeadContext,
        **unused: Any,
    ) -> Tensor:
        """See :class:`PolicyHead`."""
        weight, rows = _head_inputs(hidden_states, output_layer, output_weight, context.batch)
        if self.loss.sequence_mask is not None:
            return self._two_phases(rows, weight, context)
        fused = fused_policy_loss(
            rows,
            weight,
            context.batch.support,
            context.batch.advantages,
            self.loss,
            weights=context.batch.weights,
            temperature=self.temperature,
            shard=_vocab_shard(weight, self.vocab_size),
            check_finite=False,
        )
        _record(context, fused.statistics, fused.result, None)
        return fused.result.loss

    def _two_phases(self, rows: Tensor, weight: Tensor, context: HeadContext) -> Tensor:
        """Score every row first; backward computes only those of accepted sequences again."""
        stats = linear_policy_statistics(
            rows,
            weight,
            context.batch.support,
            temperature=self.temperature,
            shard=_vocab_shard(weight, self.vocab_size),
            entropy_gradient=self.loss.entropy_coefficient != 0,
        )
        return _loss_of_statistics(stats, context, self.loss)


@dataclass(frozen=True)
class ReferenceHead:
    """The same loss through plain autograd: ``[N, V / TP]`` logits of one micro-batch.

    Attributes:
        loss, vocab_size, temperature: as of :class:`FusedHead`.
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
        """See :class:`PolicyHead`."""
        weight, rows = _head_inputs(hidden_states, output_layer, output_weight, context.batch)
        logits = torch.nn.functional.linear(
            rows.to(self.logits_dtype), weight.to(self.logits_dtype)
        )
        stats = policy_statistics(
            logits,
            context.batch.support,
            temperature=self.temperature,
            shard=_vocab_shard(weight, self.vocab_size),
            entropy_gradient=self.loss.entropy_coefficient != 0,
        )
        return _loss_of_statistics(stats, context, self.loss)


def _head_inputs(
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    batch: MicroBatch,
) -> tuple[Tensor, Tensor]:
    """Return the head's weight and the hidden states of the response rows ``[N, H]``."""
    weight = output_weight if output_weight is not None else output_layer.weight
    hidden = _whole_hidden(hidden_states, output_layer.sequence_parallel)
    return weight, hidden.flatten(0, 1).index_select(0, batch.rows)


def _loss_of_statistics(
    stats: PolicyStatistics, context: HeadContext, loss: PolicyLossConfig
) -> Tensor:
    batch = context.batch
    accepted = None
    if loss.sequence_mask is not None:
        accepted = _accepted_tokens(loss.sequence_mask, stats, batch)
    result = policy_loss(
        stats,
        batch.support,
        batch.advantages,
        loss,
        weights=batch.weights,
        accepted=accepted,
        check_finite=False,
    )
    _record(context, stats, result, accepted)
    return result.loss


def _accepted_tokens(
    config: SequenceMaskConfig, stats: PolicyStatistics, batch: MicroBatch
) -> Tensor:
    """Return which tokens lie in accepted sequences, bool ``[N]``.

    Under context parallelism a sequence's tokens lie on several ranks. What the verdict reads of
    each token, at most four numbers, goes to all of them; each then decides from the same numbers.
    """
    support = batch.support
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        verdict = accept_sequences(
            config, stats, support, batch.local_sequence, batch.num_sequences
        )
        return expand_to_tokens(verdict.accept, batch.local_sequence)
    columns = {
        "behavior_log_prob": support.sampled_log_probs,
        "policy_log_prob": stats.log_prob.detach(),
    }
    measures = {"topk_kl": topk_kl, "topk_tv": topk_tv}
    if config.needs_divergence:
        if config.divergence not in measures:
            raise ValueError(
                f"loss.sequence_mask.divergence is {config.divergence}, which needs the behavior "
                "policy's whole distribution; use topk_kl or topk_tv"
            )
        measure = measures[config.divergence]
        columns["divergence"] = measure(support, stats)
    if config.needs_tv:
        columns["tv"] = topk_tv(support, stats)
    table = torch.stack(list(columns.values()))
    # Every token is one rank's, so that the sum only adds zeros to it.
    gathered = table.new_zeros(len(columns), batch.gathered_sequence.numel())
    gathered[:, batch.gathered_row] = table
    dist.all_reduce(gathered, group=group)
    whole = dict(zip(columns, gathered, strict=True))
    verdict = sequence_mask(
        config,
        batch.gathered_sequence,
        batch.num_sequences,
        behavior_log_prob=whole["behavior_log_prob"],
        policy_log_prob=whole["policy_log_prob"],
        divergence=whole.get("divergence"),
        tv=whole.get("tv"),
    )
    return expand_to_tokens(verdict.accept, batch.local_sequence)


def _record(
    context: HeadContext,
    stats: PolicyStatistics,
    result: PolicyLossResult,
    accepted: Tensor | None,
) -> None:
    batch = context.batch
    # Megatron adds token counts into an int tensor (schedules.py:802).
    context.num_tokens = result.num_tokens.to(torch.int)
    context.record = TokenRecord(
        sequence=batch.sequence,
        position=batch.position,
        policy_version=batch.policy_version,
        behavior_log_prob=batch.support.sampled_log_probs,
        policy_log_prob=stats.log_prob.detach(),
        divergence=result.divergence,
        topk_kl=topk_kl(batch.support, stats).detach(),
        entropy=stats.entropy.detach(),
        outside=result.mask.outside,
        outward=result.mask.outward,
        keep=result.mask.keep,
        certified=result.certified,
        accepted=accepted,
    )


def _vocab_shard(weight: Tensor, vocab_size: int) -> VocabShard:
    group = parallel_state.get_tensor_model_parallel_group()
    start = group.rank() * weight.size(0)
    return VocabShard(
        start, start + weight.size(0), vocab_size, group if group.size() > 1 else None
    )


def _whole_hidden(hidden: Tensor, sequence_parallel: bool) -> Tensor:
    """Return all tokens' hidden states, whose gradient is summed over tensor-parallel ranks.

    Each rank multiplies with its own rows of the head, so that its hidden gradient is a partial
    sum: reduce-scattered under sequence parallelism, all-reduced otherwise.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return copy_to_tensor_model_parallel_region(hidden)
