# SPDX-License-Identifier: Apache-2.0
"""The local step on a GPU: cuBLAS for the products, two Triton kernels for everything between.

The readable twin is ``pdm.kernels.reference``. Runs under Triton's interpreter on CPU tensors
(``TRITON_INTERPRET=1``, set before this module is imported), which is how it is tested without a
GPU. A row without a coefficient is zeroed, not cut out of the products: their shapes would have to
be known on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdm.kernels.local_step import LocalStatistics, RowGradient, WeightGradient

BLOCK = 4096
GRADIENT_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [C, V]
    columns_ptr,  # [C, S] int64, -1 where not owned
    scalars_ptr,  # [5, C] out: row_max, tail_sum, tail_square, tail_weighted, tail_max
    support_ptr,  # [C, S] out
    rows,
    width,
    inverse_temperature,
    SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: online maximum and sums, the support left out of the sums."""
    row = tl.program_id(0).to(tl.int64)
    row_max = -float("inf")
    total = 0.0
    square = 0.0
    weighted = 0.0
    tail_top = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        z = tl.load(logits_ptr + row * width + column, mask=inside, other=-float("inf"))
        z = z.to(tl.float32) * inverse_temperature
        tail = inside
        for s in tl.static_range(SUPPORT):
            tail = tail & (column != tl.load(columns_ptr + row * SUPPORT + s))
        new_max = tl.maximum(row_max, tl.max(z, axis=0))
        # A block of -inf only must not turn exp(-inf - -inf) into NaN.
        reference = tl.where(new_max == -float("inf"), 0.0, new_max)
        scale = tl.exp(row_max - reference)
        e = tl.where(tail, tl.exp(z - reference), 0.0)
        shifted = tl.where(e == 0.0, 0.0, z - reference)
        shift = tl.where(scale == 0.0, 0.0, row_max - reference)
        weighted = (weighted + total * shift) * scale + tl.sum(e * shifted, axis=0)
        square = square * scale * scale + tl.sum(e * e, axis=0)
        total = total * scale + tl.sum(e, axis=0)
        tail_top = tl.maximum(tail_top * scale, tl.max(e, axis=0))
        row_max = new_max
    tl.store(scalars_ptr + row, row_max)
    tl.store(scalars_ptr + rows + row, total)
    tl.store(scalars_ptr + 2 * rows + row, square)
    tl.store(scalars_ptr + 3 * rows + row, weighted)
    tl.store(scalars_ptr + 4 * rows + row, tail_top)
    for s in tl.static_range(SUPPORT):
        column = tl.load(columns_ptr + row * SUPPORT + s)
        value = tl.load(logits_ptr + row * width + column, mask=column >= 0, other=0.0)
        value = value.to(tl.float32) * inverse_temperature
        tl.store(support_ptr + row * SUPPORT + s, value)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [C, V]
    out_ptr,  # [C, V] out: the logits' gradient
    normalizer_ptr,  # [C]
    coefficient_ptr,  # [C]
    sampled_ptr,  # [C] int64, -1 where not owned
    bonus_ptr,  # [C], read only with HAS_BONUS
    entropy_ptr,  # [C], read only with HAS_BONUS
    width,
    inverse_temperature,
    HAS_BONUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """g = (c (1[y] - pi) - b pi (log pi + H)) / T; exactly 0 where c = b = 0, NaN or not."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    # Spread over the block: the interpreter refuses to combine a scalar condition with a mask.
    spread = tl.zeros([BLOCK], tl.float32)
    coefficient = tl.load(coefficient_ptr + row) + spread
    active = coefficient != 0.0
    bonus = spread
    if HAS_BONUS:
        bonus = tl.load(bonus_ptr + row) + spread
        active = active | (bonus != 0.0)
    z = tl.load(logits_ptr + row * width + column, mask=inside & active, other=-float("inf"))
    log_prob = z.to(tl.float32) * inverse_temperature - tl.load(normalizer_ptr + row)
    prob = tl.exp(log_prob)
    gradient = -coefficient * prob
    if HAS_BONUS:
        surprise = tl.where(prob == 0.0, 0.0, log_prob) + tl.load(entropy_ptr + row)
        gradient = gradient - bonus * prob * surprise
    gradient = tl.where(column == tl.load(sampled_ptr + row), gradient + coefficient, gradient)
    gradient = tl.where(active, gradient * inverse_temperature, 0.0)
    tl.store(out_ptr + row * width + column, gradient.to(out_ptr.dtype.element_ty), mask=inside)


class TritonStep:
    """See :class:`pdm.kernels.local_step.LocalStep`. Keeps C x V logits in ``buffer``.

    Args:
        temperature: the logits are divided by it.
        buffer: 1-d float32 scratch of at least C x V elements.
    """

    def __init__(self, temperature: float, buffer: Tensor) -> None:
        self._inverse_temperature = 1.0 / temperature
        self._buffer = buffer

    def statistics(self, hidden: Tensor, weight: Tensor, columns: Tensor) -> LocalStatistics:
        """Compute the statistics; keeps the logits."""
        self._hidden, self._weight = hidden, weight
        count, width, support = hidden.shape[0], weight.shape[0], columns.shape[1]
        self._logits = self._buffer[: count * width].view(count, width)
        scalars = self._logits.new_zeros(5, count)
        scalars[0] = -torch.inf
        support_logits = self._logits.new_zeros(count, support)
        if count and width:
            _product(hidden, weight.T, out=self._logits)
            _statistics_kernel[(count,)](
                self._logits,
                columns.contiguous(),
                scalars,
                support_logits,
                count,
                width,
                self._inverse_temperature,
                SUPPORT=support,
                BLOCK=min(BLOCK, triton.next_power_of_2(width)),
            )
        return LocalStatistics.unpack(torch.cat([scalars.T, support_logits], dim=-1))

    def add_gradient(
        self,
        rows: RowGradient,
        hidden_grad: Tensor | None,
        weight_grad: WeightGradient | None,
    ) -> None:
        """Add the gradients; rows without a coefficient add exact zeros."""
        count, width = self._logits.shape
        if count == 0 or width == 0:
            return
        gradient = torch.empty_like(self._logits, dtype=self._weight.dtype)
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(width))
        bonus = rows.entropy_coefficient
        _gradient_kernel[(count, triton.cdiv(width, block))](
            self._logits,
            gradient,
            rows.log_normalizer,
            rows.coefficient,
            rows.sampled_column,
            rows.coefficient if bonus is None else bonus,
            rows.entropy,
            width,
            self._inverse_temperature,
            HAS_BONUS=bonus is not None,
            BLOCK=block,
        )
        if hidden_grad is not None:
            hidden_grad += _product(gradient, self._weight)
        if weight_grad is not None:
            weight_grad.add(_product(gradient.T, self._hidden))
            weight_grad.end_chunk()


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Matrix product with a float32 result, also of bfloat16 factors."""
    if a.dtype == torch.float32:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if a.is_cuda:
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    product = torch.mm(a.float(), b.float())
    return product if out is None else out.copy_(product)
