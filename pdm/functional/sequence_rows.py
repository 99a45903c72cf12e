# SPDX-License-Identifier: Apache-2.0
"""The rows of a packed batch, grouped by the sequence they belong to, and reductions per sequence.

Sums are taken over sorted segments, not with atomic additions: those round in an order that
changes from run to run on a GPU, and ranks that hold the same tokens could then decide
differently at a threshold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Which rows belong to which sequence, whole sequences only.

    - ``order`` [T] int64: rows sorted by sequence, in their own order inside each; the rows that
      are not trained on come last
    - ``lengths`` [B] int64: trained rows of each sequence
    - ``segments`` [B + 1] int64: the lengths, then the number of rows that are not trained on
    """

    order: Tensor
    lengths: Tensor
    segments: Tensor

    def total(self, values: Tensor) -> Tensor:
        """Sum ``values`` [T] float64 over each sequence: [B], 0 for an empty one."""
        return self._reduce(values, "sum")

    def largest(self, values: Tensor) -> Tensor:
        """Maximum of ``values`` [T] float64 >= 0 in each sequence: [B], 0 for an empty one."""
        return self._reduce(values, "max")

    def any(self, flags: Tensor) -> Tensor:
        """Whether any of ``flags`` [T] bool is set in each sequence: [B] bool."""
        return self.largest(flags.double()) > 0

    def steps_after(self) -> Tensor:
        """Count the trained rows that follow each row in its sequence: [T] int64.

        T - t for the t-th of T tokens, hence 0 at the last. Without meaning, but not negative, at
        rows that are not trained on.
        """
        # The last row of each segment, counted in sorted rows, minus the row's own place there.
        last = self.segments.cumsum(0) - 1
        rows = self.order.numel()
        place = torch.arange(rows, device=self.order.device)
        after = torch.repeat_interleave(last, self.segments, output_size=rows) - place
        return torch.empty_like(after).scatter(0, self.order, after)

    def _reduce(self, values: Tensor, reduce: str) -> Tensor:
        # unsafe skips a check of the lengths that would stop the host. The last segment holds the
        # rows that are not trained on; whatever they contain goes no further.
        reduced = torch.segment_reduce(
            values[self.order], reduce, lengths=self.segments, unsafe=True, initial=0.0
        )
        return reduced[:-1]


def group_rows(
    caller: str, sequence_ids: Tensor, num_sequences: int, trained: Tensor | None = None
) -> SequenceRows:
    """Group the rows of a packed batch by sequence.

    Shapes: ``sequence_ids`` [T] integer, in 0 .. ``num_sequences`` - 1 where ``trained`` [T] bool
    is true (None: everywhere) and anything elsewhere. Rows of different sequences may interleave.

    Gradient: none.

    Edge cases: T = 0, B = 0 and sequences without rows are fine. Ids that are not integers, wrong
    shapes and, on the CPU, ids out of range raise ``ValueError`` in the name of ``caller``; on
    other devices the index kernel's own check reports them, without stopping the host.
    """
    if isinstance(num_sequences, bool) or not isinstance(num_sequences, int) or num_sequences < 0:
        raise ValueError(f"{caller}: num_sequences must be an integer >= 0, got {num_sequences!r}")
    if sequence_ids.dtype == torch.bool or not _is_integer(sequence_ids):
        raise ValueError(f"{caller}: sequence_ids must be integers, got {sequence_ids.dtype}")
    ids = sequence_ids.reshape(-1).long()
    if trained is None:
        chosen = torch.ones_like(ids, dtype=torch.bool)
    else:
        if trained.dtype != torch.bool or trained.shape != sequence_ids.shape:
            raise ValueError(
                f"{caller}: trained must be bool of shape {tuple(sequence_ids.shape)}, like "
                f"sequence_ids, got {trained.dtype} of shape {tuple(trained.shape)}"
            )
        chosen = trained.reshape(-1)
    if ids.device.type == "cpu":
        _check_range(caller, ids[chosen], num_sequences)

    lengths = torch.zeros(num_sequences, dtype=torch.int64, device=ids.device)
    if num_sequences > 0:
        lengths = lengths.index_add(0, torch.where(chosen, ids, 0), chosen.long())
    _, order = torch.where(chosen, ids, num_sequences).sort(stable=True)
    rest = (ids.numel() - lengths.sum()).reshape(1)
    return SequenceRows(order=order, lengths=lengths, segments=torch.cat([lengths, rest]))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _check_range(caller: str, ids: Tensor, num_sequences: int) -> None:
    if ids.numel() == 0:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= num_sequences:
        raise ValueError(
            f"{caller}: sequence_ids must be in 0 .. num_sequences - 1 = {num_sequences - 1}, got "
            f"ids from {lowest} to {highest}"
        )
