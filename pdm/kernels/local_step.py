# SPDX-License-Identifier: Apache-2.0
"""What a local step takes and gives, whichever implementation does it.

Letters: C rows of a chunk, H hidden, V local vocabulary rows (padding cut off), S support columns.
z = hidden weight^T / temperature; the *tail* of a row is every local column outside its support.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LocalStatistics:
    """One rank's statistics of a chunk's logits z [C, V], relative to the row's local maximum m.

    - ``row_max`` [C]: m = max over all local columns, -inf for a shard without columns
    - ``tail_sum``, ``tail_square`` [C]: sums of e^(z - m) and of its square over the local tail
    - ``tail_weighted`` [C]: sum of e^(z - m) (z - m) over the local tail
    - ``tail_max`` [C]: largest e^(z - m) of the local tail, 0 without one
    - ``support_logits`` [C, S]: z of the support columns that this shard owns, 0 elsewhere
    """

    row_max: Tensor
    tail_sum: Tensor
    tail_square: Tensor
    tail_weighted: Tensor
    tail_max: Tensor
    support_logits: Tensor

    def pack(self) -> Tensor:
        """Return all of it as one tensor, for one collective: [C, 5 + S]."""
        scalars = (
            self.row_max,
            self.tail_sum,
            self.tail_square,
            self.tail_weighted,
            self.tail_max,
        )
        return torch.cat([torch.stack(scalars, dim=-1), self.support_logits], dim=-1)

    @classmethod
    def unpack(cls, packed: Tensor) -> LocalStatistics:
        """Undo :meth:`pack`, over any leading shape."""
        row_max, tail_sum, tail_square, tail_weighted, tail_max = packed[..., :5].unbind(-1)
        return cls(row_max, tail_sum, tail_square, tail_weighted, tail_max, packed[..., 5:])


@dataclass(frozen=True, eq=False)
class RowGradient:
    """What decides a row's logit gradient g = c (1[y] - pi) - b pi (log pi + H), times 1/T.

    - ``log_normalizer`` [C]: log of the sum of e^z over the whole vocabulary
    - ``coefficient`` [C]: c = d loss / d log pi_y; a row with c = b = 0 is not touched
    - ``sampled_column`` [C] int64: local column of y, -1 where another shard owns it
    - ``entropy_coefficient`` [C]: b = d loss / d H; None for 0
    - ``entropy`` [C]: H, used with ``entropy_coefficient`` only
    """

    log_normalizer: Tensor
    coefficient: Tensor
    sampled_column: Tensor
    entropy_coefficient: Tensor | None
    entropy: Tensor

    def active_rows(self) -> Tensor:
        """Return the rows that have a gradient: [A] int64. Synchronises an accelerator."""
        active = self.coefficient != 0
        if self.entropy_coefficient is not None:
            active = active | (self.entropy_coefficient != 0)
        return active.nonzero().squeeze(-1)


class WeightGradient:
    """The head's weight gradient [V, H] while it is summed over chunks.

    The first chunk writes instead of adding: a buffer of zeros would be touched once more, and at
    152,000 rows the page faults of that cost as much as a tenth of a matrix product.

    Args:
        weight: [V, H] or more rows; those beyond ``true_rows`` are padding, with a gradient of 0.
        true_rows: V.
        dtype: of the sum, float32 or wider.
    """

    def __init__(self, weight: Tensor, true_rows: int, dtype: torch.dtype) -> None:
        self._whole = torch.empty_like(weight, dtype=dtype)
        self._whole[true_rows:].zero_()
        self._sum = self._whole[:true_rows]
        self._written = False

    def add_product(self, rows: slice, a: Tensor, b: Tensor) -> None:
        """Add a [rows, C] times b [C, H]; every chunk covers all rows once, or none."""
        part = self._sum[rows]
        if self._written:
            part.addmm_(a, b)
        else:
            torch.mm(a, b, out=part)

    def add(self, product: Tensor) -> None:
        """Add a product [V, H] of all rows that was computed elsewhere."""
        if self._written:
            self._sum += product
        else:
            self._sum.copy_(product)

    def end_chunk(self) -> None:
        """Say that this chunk's products cover all rows."""
        self._written = True

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add ``values`` [N, H] to the rows named, after :meth:`end_chunk`."""
        self._sum.index_add_(0, rows, values)

    def finish(self) -> Tensor:
        """Return the sum, padding included; zeros if no chunk had a gradient."""
        return self._whole if self._written else self._whole.zero_()


class LocalStep(Protocol):
    """One chunk in the hands of an implementation: statistics first, then the gradient.

    ``columns`` [C, S] int64 holds local column numbers of the support, -1 where not owned.
    """

    def statistics(self, hidden: Tensor, weight: Tensor, columns: Tensor) -> LocalStatistics:
        """Compute the statistics of hidden [C, H] against weight [V, H]; keeps what it needs."""
        ...

    def add_gradient(
        self,
        rows: RowGradient,
        hidden_grad: Tensor | None,
        weight_grad: WeightGradient | None,
    ) -> None:
        """Add this chunk's gradients to ``hidden_grad`` [C, H] and ``weight_grad``.

        Gradients are with respect to the hidden states and the weight that ``statistics`` got; None
        is not computed (a frozen trunk, a frozen head). May use up what was kept.
        """
        ...
