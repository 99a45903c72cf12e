# SPDX-License-Identifier: Apache-2.0
"""The policy loss straight from hidden states: statistics, mask and gradient in one pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pdm.functional.token_masks import MaskResult
from pdm.kernels.local_step import RowGradient, WeightGradient
from pdm.loss.config import PolicyLossConfig
from pdm.loss.policy_loss import PolicyLossResult, policy_loss, raise_on_non_finite
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport
from pdm.vocab_parallel.chunks import (
    Chunk,
    HeadSettings,
    Implementation,
    deliver_weight_gradient,
    sampled_column,
    walk,
)
from pdm.vocab_parallel.linear_statistics import (
    concatenate_statistics,
    empty_statistics,
    head_settings,
)
from pdm.vocab_parallel.shard import VocabShard


@dataclass(frozen=True, eq=False)
class FusedPolicyLoss:
    """What ``fused_policy_loss`` returns.

    - ``result``: as of ``policy_loss``; ``result.loss`` carries the gradient
    - ``statistics``: of the policy, all detached
    """

    result: PolicyLossResult
    statistics: PolicyStatistics


@dataclass(frozen=True, eq=False)
class _TokenInputs:
    """The per-token arguments of ``policy_loss``, to be cut into chunks."""

    advantages: Tensor
    weights: Tensor | None
    accepted: Tensor | None
    reference_log_prob: Tensor | None

    def rows(self, rows: slice) -> dict[str, Tensor | None]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: None if value is None else value[rows] for name, value in values.items()}


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    support: BehaviorSupport,
    advantages: Tensor,
    config: PolicyLossConfig,
    *,
    weights: Tensor | None = None,
    accepted: Tensor | None = None,
    reference_log_prob: Tensor | None = None,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    chunk_size: int | None = None,
    impl: Implementation = "auto",
    check_finite: bool = True,
) -> FusedPolicyLoss:
    """Compute ``policy_loss`` of the head's logits, and its gradient in the same pass.

    The loss is that of ``policy_loss(policy_statistics(hidden @ weight.T / temperature), ...)``.
    Mask, ratio and advantage of a token are known as soon as its chunk's statistics are, so its
    logit gradient is formed then and there: (1 + 2p) / 3 of three matrix products for a share p of
    tokens with a gradient, and no [T, V] tensor. Backward only scales.

    Shapes: ``hidden`` [T, H], ``weight`` [V, H] (this rank's rows when ``shard`` is given, padding
    included); the others as in ``policy_loss``, all T tokens being trained ones.

    Gradient: of ``result.loss`` towards ``hidden`` and ``weight``; nothing is computed for inputs
    that need none, nor when gradients are off. Over shards the gradient of ``hidden`` is this
    rank's part of a sum that the caller reduces. If ``weight`` has a ``main_grad`` (Megatron's
    float32 accumulation buffer), its gradient is added there in backward,
    ``grad_added_to_main_grad`` is set, and autograd gets zeros.

    Edge cases: those of ``policy_loss``; a token without a coefficient adds exactly 0, its logits
    are never looked at for the gradient. T = 0 gives a loss of 0 that back-propagates zeros. A
    second backward raises ``RuntimeError``: the first one scales the gradients in place.

    Source: predictive divergence masks, Eq. 13 and 14.
    """
    settings = head_settings(hidden, weight, support, temperature, shard, chunk_size, impl)
    inputs = _TokenInputs(advantages, weights, accepted, reference_log_prob)
    # Inside forward grad mode is off and needs_input_grad does not tell (it stays true).
    grad_enabled = torch.is_grad_enabled()
    outputs = _Outputs()
    loss = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, support, inputs, config, settings, grad_enabled, outputs
    )
    assert outputs.result is not None and outputs.statistics is not None
    result = replace(outputs.result, loss=loss)
    if check_finite and config.non_finite == "raise":
        raise_on_non_finite(result)
    return FusedPolicyLoss(result, outputs.statistics)


class _Outputs:
    """Carries what has no gradient out of the autograd function."""

    result: PolicyLossResult | None = None
    statistics: PolicyStatistics | None = None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        support: BehaviorSupport,
        inputs: _TokenInputs,
        config: PolicyLossConfig,
        settings: HeadSettings,
        grad_enabled: bool,
        outputs: _Outputs,
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight = (grad_enabled and x for x in ctx.needs_input_grad[:2])
        hidden_grad = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        true_rows = settings.shard.true_width
        weight_grad = WeightGradient(weight, true_rows, dtype) if needs_weight else None
        results, statistics = [], []
        for chunk in walk(hidden, weight, support, settings):
            result = policy_loss(
                chunk.merged.statistics,
                chunk.support,
                config=config,
                check_finite=False,
                **inputs.rows(chunk.rows),  # type: ignore[arg-type]
            )
            results.append(result)
            statistics.append(chunk.merged.statistics)
            if hidden_grad is not None or weight_grad is not None:
                _add_gradient(chunk, result, inputs, config, settings, hidden_grad, weight_grad)
        outputs.statistics = (
            concatenate_statistics(statistics)
            if statistics
            else empty_statistics(hidden, support, settings)
        )
        outputs.result = (
            _concatenate_results(results)
            if results
            else policy_loss(
                outputs.statistics,
                support,
                config=config,
                **inputs.rows(slice(None)),  # type: ignore[arg-type]
            )
        )
        ctx.hidden_grad = hidden_grad
        ctx.weight_grad = None if weight_grad is None else weight_grad.finish()
        ctx.hidden_dtype, ctx.weight, ctx.used = hidden.dtype, weight, False
        return outputs.result.loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError(
                "fused_policy_loss: backward ran already, and used up the gradients that forward "
                "formed; compute the loss again"
            )
        ctx.used = True
        hidden_grad, weight_grad = ctx.hidden_grad, ctx.weight_grad
        ctx.hidden_grad = ctx.weight_grad = None
        if hidden_grad is not None:
            hidden_grad = hidden_grad.mul_(grad_loss).to(ctx.hidden_dtype)
        if weight_grad is not None:
            weight_grad = deliver_weight_gradient(ctx.weight, weight_grad.mul_(grad_loss))
        return (hidden_grad, weight_grad, *(None,) * 6)


def _add_gradient(
    chunk: Chunk,
    result: PolicyLossResult,
    inputs: _TokenInputs,
    config: PolicyLossConfig,
    settings: HeadSettings,
    hidden_grad: Tensor | None,
    weight_grad: WeightGradient | None,
) -> None:
    statistics = chunk.merged.statistics
    gradient = RowGradient(
        log_normalizer=chunk.merged.log_normalizer,
        coefficient=result.coefficient,
        sampled_column=sampled_column(chunk.support, settings.shard),
        entropy_coefficient=_entropy_coefficient(result, inputs.rows(chunk.rows), config),
        entropy=statistics.entropy,
    )
    chunk_grad = None if hidden_grad is None else hidden_grad[chunk.rows]
    chunk.step.add_gradient(gradient, chunk_grad, weight_grad)


def _entropy_coefficient(
    result: PolicyLossResult, inputs: dict[str, Tensor | None], config: PolicyLossConfig
) -> Tensor | None:
    """d loss / d H of each token, as in the bonus of ``policy_loss``; None without a bonus."""
    if config.entropy_coefficient == 0:
        return None
    weights = inputs["weights"]
    ones = torch.ones_like(result.coefficient)
    coefficient = -config.entropy_coefficient * (ones if weights is None else weights)
    if config.non_finite == "drop":
        coefficient = torch.where(result.non_finite, 0.0, coefficient)
    return coefficient


def _concatenate_results(parts: list[PolicyLossResult]) -> PolicyLossResult:
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(PolicyLossResult):
        values = [getattr(part, field.name) for part in parts]
        if values[0] is None:
            joined[field.name] = None
        elif isinstance(values[0], MaskResult):
            joined[field.name] = MaskResult(
                *(
                    torch.cat([getattr(value, f.name) for value in values])
                    for f in dataclasses.fields(MaskResult)
                )
            )
        elif values[0].dim() == 0:
            joined[field.name] = torch.stack(values).sum()
        else:
            joined[field.name] = torch.cat(values)
    return PolicyLossResult(**joined)
