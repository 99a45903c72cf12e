# SPDX-License-Identifier: Apache-2.0
"""The readable twin of every faster local step: whole [C, V] tensors, plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from pdm.kernels.local_step import LocalStatistics, RowGradient, WeightGradient


class ReferenceStep:
    """See :class:`pdm.kernels.local_step.LocalStep`; the specification of the others."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def statistics(self, hidden: Tensor, weight: Tensor, columns: Tensor) -> LocalStatistics:
        """Compute the statistics; keeps the logits."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.logits = z = (self.hidden / self.temperature) @ self.weight.T
        owned = columns >= 0
        if z.shape[1] == 0:
            zeros = z.new_zeros(z.shape[0])
            return LocalStatistics(
                zeros - torch.inf, zeros, zeros, zeros, zeros, z.new_zeros(columns.shape)
            )
        row_max = z.amax(dim=-1)
        shifted = z - row_max.unsqueeze(-1)
        tail = shifted.exp()
        # One spare column takes the writes of support columns that are elsewhere.
        padded = torch.cat([tail, tail.new_zeros(tail.shape[0], 1)], dim=-1)
        padded.scatter_(-1, torch.where(owned, columns, z.shape[1]), 0.0)
        tail = padded[:, :-1]
        picked = z.gather(-1, columns.clamp_min(0))
        return LocalStatistics(
            row_max=row_max,
            tail_sum=tail.sum(dim=-1),
            tail_square=tail.square().sum(dim=-1),
            tail_weighted=(tail * torch.where(tail == 0.0, 0.0, shifted)).sum(dim=-1),
            tail_max=tail.amax(dim=-1),
            support_logits=torch.where(owned, picked, 0.0),
        )

    def add_gradient(
        self,
        rows: RowGradient,
        hidden_grad: Tensor | None,
        weight_grad: WeightGradient | None,
    ) -> None:
        """Add the gradients of the active rows."""
        active = rows.active_rows()
        log_probs = self.logits[active] - rows.log_normalizer[active].unsqueeze(-1)
        probs = log_probs.exp()
        gradient = -probs * rows.coefficient[active].unsqueeze(-1)
        owned = rows.sampled_column[active] >= 0
        if self.logits.shape[1] > 0:
            hit = torch.where(owned, rows.coefficient[active], 0.0)
            column = rows.sampled_column[active].clamp_min(0)
            gradient.scatter_add_(-1, column.unsqueeze(-1), hit.unsqueeze(-1))
        if rows.entropy_coefficient is not None:
            surprise = torch.where(probs == 0.0, 0.0, log_probs)
            surprise = surprise + rows.entropy[active].unsqueeze(-1)
            gradient -= probs * surprise * rows.entropy_coefficient[active].unsqueeze(-1)
        gradient = gradient / self.temperature
        if hidden_grad is not None:
            hidden_grad.index_add_(0, active, (gradient @ self.weight).to(hidden_grad.dtype))
        if weight_grad is not None:
            weight_grad.add_product(slice(None), gradient.T, self.hidden[active])
            weight_grad.end_chunk()
