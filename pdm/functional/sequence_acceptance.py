# SPDX-License-Identifier: Apache-2.0
"""The verdict of a sequence mask: accepted sequences, their tokens, and acceptance by length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdm.functional.sequence_rows import group_rows


@dataclass(frozen=True, eq=False)
class SequenceMaskResult:
    """Which sequences may be trained on, and how close each one came.

    - ``accept`` [B] bool
    - ``score`` [B] float32 or float64: the criterion's statistic divided by its threshold, the
      largest where several apply. At most 1 if accepted, at least 1 if not, NaN if invalid
    - ``lengths`` [B] int64: trained tokens of each sequence
    - ``invalid`` [B] bool: rejected because a token's input is garbage (NaN)

    ``a & b`` accepts what both accept.
    """

    accept: Tensor
    score: Tensor
    lengths: Tensor
    invalid: Tensor

    def __and__(self, other: SequenceMaskResult) -> SequenceMaskResult:
        if other.accept.shape != self.accept.shape:
            raise ValueError(
                "SequenceMaskResult: only results for the same sequences combine, got "
                f"{tuple(self.accept.shape)} and {tuple(other.accept.shape)}"
            )
        return SequenceMaskResult(
            accept=self.accept & other.accept,
            score=torch.maximum(self.score, other.score),
            lengths=self.lengths,
            invalid=self.invalid | other.invalid,
        )

    @property
    def num_scored(self) -> Tensor:
        """Count the sequences that have tokens: [] int64."""
        return (self.lengths > 0).sum()

    @property
    def num_accepted(self) -> Tensor:
        """Count the accepted sequences that have tokens: [] int64."""
        return (self.accept & (self.lengths > 0)).sum()

    @property
    def acceptance_rate(self) -> Tensor:
        """Share of accepted sequences among those with tokens: [] float64, NaN without any.

        Of this batch. Over several batches or ranks, add up the counts and divide once.
        """
        return self.num_accepted.double() / self.num_scored


@dataclass(frozen=True, eq=False)
class LengthCounts:
    """Sequences by length. Counts, so that they add up over batches and ranks.

    - ``upper_edges``: longest length of each bucket but the last, which is open
    - ``total``, ``accepted`` [len(upper_edges) + 1] int64
    """

    upper_edges: tuple[int, ...]
    total: Tensor
    accepted: Tensor

    @property
    def acceptance_rate(self) -> Tensor:
        """Share of accepted sequences in each bucket: [buckets] float64, NaN in an empty one."""
        return self.accepted.double() / self.total


def expand_to_tokens(
    accept: Tensor, sequence_ids: Tensor, *, trained: Tensor | None = None
) -> Tensor:
    """Give every token the verdict on its sequence.

    keep_t = accept[sequence of t].

    Shapes: ``accept`` [B] bool, ``sequence_ids`` [T] integer in 0 .. B - 1, ``trained`` [T] bool
    (None: all); any leading shape may stand in place of [T]. Returns bool of that shape.

    Gradient: none.

    Edge cases: a token that is not trained on is no business of a mask: it gets true, whatever its
    id. Wrong shapes, dtypes and ids raise ``ValueError`` as in ``trm_mask``.

    Source: trust region masking, section 4.2 (the mask multiplies all tokens of a sequence).
    """
    if accept.dim() != 1 or accept.dtype != torch.bool:
        raise ValueError(
            f"expand_to_tokens: accept must be bool [B], got {accept.dtype} of shape "
            f"{tuple(accept.shape)}"
        )
    group_rows("expand_to_tokens", sequence_ids, accept.numel(), trained)  # checks them
    ids = sequence_ids.long()
    if accept.numel() == 0:
        return torch.ones_like(ids, dtype=torch.bool)
    if trained is None:
        return accept[ids]
    return accept[torch.where(trained, ids, 0)] | ~trained


def acceptance_by_length(result: SequenceMaskResult, upper_edges: tuple[int, ...]) -> LengthCounts:
    """Count sequences and accepted sequences by length, to see a bias against long ones.

    Bucket i holds lengths above upper_edges[i - 1] and up to upper_edges[i]; the last is open.

    Shapes: a result for B sequences; returns counts [len(upper_edges) + 1] int64.

    Gradient: none.

    Edge cases: sequences without tokens are in no bucket. Without edges there is one bucket. Edges
    that are not positive integers in rising order raise ``ValueError``.

    Source: trust region masking, Appendix F.1 (acceptance falls with length).
    """
    rising = all(low < high for low, high in zip((0, *upper_edges), upper_edges, strict=False))
    if not (rising and all(type(edge) is int for edge in upper_edges)):
        raise ValueError(
            "acceptance_by_length: upper_edges must be positive integers in rising order, got "
            f"{upper_edges!r}"
        )
    lengths = result.lengths
    edges = torch.tensor(upper_edges, dtype=torch.int64, device=lengths.device)
    bucket = torch.bucketize(lengths, edges)
    none = torch.zeros(len(upper_edges) + 1, dtype=torch.int64, device=lengths.device)
    scored = lengths > 0
    return LengthCounts(
        upper_edges=tuple(upper_edges),
        total=none.index_add(0, bucket, scored.long()),
        accepted=none.index_add(0, bucket, (scored & result.accept).long()),
    )
