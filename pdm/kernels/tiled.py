# SPDX-License-Identifier: Apache-2.0
"""The local step on CPU: three matrix products, everything else while a tile is in cache.

The vocabulary is walked in tiles. Each tile's logits are turned into exponentials e^(z - m_tile),
relative to the row's maximum *within the tile*, and kept; so every element is exponentiated once,
and the gradient needs nothing but a factor a row and tile, e^(m_tile - log Z) c. Both gradient
products then run on the same tile while it is in cache. PyTorch spreads each operation over the
cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdm.kernels.local_step import LocalStatistics, RowGradient, WeightGradient

# A tile of 512 rows x 1024 columns x 4 bytes is 2 MiB: the second-level caches of two cores.
TILE_COLUMNS = 1024


class TiledStep:
    """See :class:`pdm.kernels.local_step.LocalStep`. Keeps C x V exponentials in ``buffer``.

    Args:
        temperature: the logits are divided by it.
        buffer: 1-d scratch of at least C x V elements in the computation's dtype; reused by
            whoever made it once the gradient has been added.
    """

    def __init__(self, temperature: float, buffer: Tensor) -> None:
        self.temperature = temperature
        self._buffer = buffer

    def statistics(self, hidden: Tensor, weight: Tensor, columns: Tensor) -> LocalStatistics:
        """Compute the statistics, tile by tile; keeps the exponentials and the tiles' maxima."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._hidden, self._weight = hidden.to(dtype), weight
        scaled = self._hidden if self.temperature == 1.0 else self._hidden / self.temperature
        count, width = hidden.shape[0], weight.shape[0]
        self._starts = list(range(0, width, TILE_COLUMNS))
        tiles = len(self._starts)
        support_logits = scaled.new_zeros(columns.shape)
        if tiles == 0 or count == 0:
            self._tile_max = scaled.new_empty(0, count)
            zeros = scaled.new_zeros(count)
            return LocalStatistics(zeros - torch.inf, zeros, zeros, zeros, zeros, support_logits)
        self._tile_max = scaled.new_empty(tiles, count)
        sums = scaled.new_empty(4, tiles, count)
        scratch = scaled.new_empty(count * TILE_COLUMNS)
        entries = _SupportEntries(columns, self._starts)
        for i, start in enumerate(self._starts):
            tile = weight[start : start + TILE_COLUMNS].to(dtype)
            shifted = scratch[: count * tile.shape[0]].view(count, -1)
            torch.mm(scaled, tile.T, out=shifted)
            torch.amax(shifted, dim=1, out=self._tile_max[i])
            shifted -= self._tile_max[i].unsqueeze(1)
            e = torch.exp(shifted, out=self._tile(i, count, tile.shape[0]))
            rows, local, flat = entries.of_tile(i, start)
            if len(rows):
                support_logits.view(-1)[flat] = shifted[rows, local] + self._tile_max[i][rows]
                kept = e[rows, local]
                e[rows, local] = 0.0
            torch.sum(e, dim=1, out=sums[0, i])
            _row_dot(e, e, out=sums[1, i])
            # 0 * -inf is NaN where a logit is -inf; finite weights give finite logits.
            _row_dot(e, shifted, out=sums[2, i])
            torch.amax(e, dim=1, out=sums[3, i])
            if len(rows):
                e[rows, local] = kept
        return self._merge_tiles(sums, support_logits)

    def _merge_tiles(self, sums: Tensor, support_logits: Tensor) -> LocalStatistics:
        """Bring the tiles' sums to one reference, the row's maximum."""
        row_max = self._tile_max.amax(dim=0)
        shift = self._tile_max - row_max
        scale = shift.exp()
        tail_sum, tail_square, tail_weighted, tail_max = sums
        # e^(z - m) (z - m) with z - m = (z - m_tile) + (m_tile - m)
        weighted = tail_weighted + tail_sum * torch.where(scale == 0.0, 0.0, shift)
        return LocalStatistics(
            row_max=row_max,
            tail_sum=(tail_sum * scale).sum(dim=0),
            tail_square=(tail_square * scale.square()).sum(dim=0),
            tail_weighted=(weighted * scale).sum(dim=0),
            tail_max=(tail_max * scale).amax(dim=0),
            support_logits=support_logits,
        )

    def add_gradient(
        self,
        rows: RowGradient,
        hidden_grad: Tensor | None,
        weight_grad: WeightGradient | None,
    ) -> None:
        """Add the gradients of the active rows, tile by tile; uses up the exponentials."""
        active = rows.active_rows()
        count = self._hidden.shape[0]
        if len(active) == 0 or not self._starts:
            return
        everyone = len(active) == count
        hidden = self._hidden if everyone else self._hidden[active]
        coefficient = rows.coefficient[active] / self.temperature
        scale = (self._tile_max[:, active] - rows.log_normalizer[active]).exp()
        partial = None if hidden_grad is None else torch.zeros_like(hidden)
        for i, start in enumerate(self._starts):
            tile = self._weight[start : start + TILE_COLUMNS].to(hidden.dtype)
            e = self._tile(i, count, tile.shape[0])
            gradient = e if everyone else e[active]
            if rows.entropy_coefficient is None:
                gradient *= (-coefficient * scale[i]).unsqueeze(1)
            else:
                gradient = self._with_entropy(gradient, rows, active, scale[i], coefficient)
            if partial is not None:
                partial.addmm_(gradient, tile)
            if weight_grad is not None:
                weight_grad.add_product(slice(start, start + len(tile)), gradient.T, hidden)
        # The c 1[y] part: one row of the head a token.
        column = rows.sampled_column[active]
        hit = torch.where(column >= 0, coefficient, 0.0).unsqueeze(1)
        column = column.clamp_min(0)
        if weight_grad is not None:
            weight_grad.end_chunk()
            weight_grad.add_rows(column, hit * hidden)
        if hidden_grad is not None and partial is not None:
            partial += hit * self._weight[column].to(hidden.dtype)
            hidden_grad.index_add_(0, active, partial.to(hidden_grad.dtype))

    def _with_entropy(
        self, e: Tensor, rows: RowGradient, active: Tensor, scale: Tensor, coefficient: Tensor
    ) -> Tensor:
        """Return -c pi - b pi (log pi + H) for the active rows of a tile, over T."""
        assert rows.entropy_coefficient is not None
        probs = e * scale.unsqueeze(1)
        surprise = torch.where(probs == 0.0, 0.0, probs.log()) + rows.entropy[active].unsqueeze(1)
        bonus = rows.entropy_coefficient[active] / self.temperature
        return -probs * (coefficient.unsqueeze(1) + bonus.unsqueeze(1) * surprise)

    def _tile(self, i: int, count: int, columns: int) -> Tensor:
        start = i * TILE_COLUMNS * count
        return self._buffer[start : start + count * columns].view(count, columns)


class _SupportEntries:
    """The owned support columns of a chunk, sorted into tiles on the host once."""

    def __init__(self, columns: Tensor, starts: list[int]) -> None:
        flat = (columns.reshape(-1) >= 0).nonzero().squeeze(-1)
        column = columns.reshape(-1)[flat]
        order = column.argsort()
        self._flat, self._column = flat[order], column[order]
        self._row = self._flat // columns.shape[1]
        bounds = torch.tensor([*starts, torch.iinfo(torch.int64).max])
        self._ends = torch.searchsorted(self._column, bounds).tolist()

    def of_tile(self, i: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, columns within the tile, and places in the flattened [C, S]."""
        entries = slice(self._ends[i], self._ends[i + 1])
        return self._row[entries], self._column[entries] - start, self._flat[entries]


def _row_dot(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Dot products of matching rows [C, V], [C, V] -> [C]."""
    torch.bmm(a.unsqueeze(1), b.unsqueeze(2), out=out.view(-1, 1, 1))
