# SPDX-License-Identifier: Apache-2.0
"""Per-token weights that turn a sum over tokens into the mean one wants.

The trainer adds up w_t l_t over micro-batches and ranks and divides once, by N, the number of
response tokens in the whole global batch. What kind of mean that is, is decided by w_t alone, and
does not depend on how the batch was split.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


def token_weights(
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    *,
    aggregation: Aggregation,
    global_tokens: int,
    global_sequences: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the weights w_t for which sum_t w_t l_t / N is the chosen mean.

    - ``"token_mean"``, all tokens alike: w_t = 1
    - ``"sequence_mean"``, the mean over sequences of each one's mean over its tokens:
      w_t = N / (B * length of the sequence of t)

    with N = ``global_tokens`` and B = ``global_sequences`` of the whole global batch (all
    micro-batches, all data-parallel ranks).

    Shapes: ``sequence_ids`` [T] integer, row of ``sequence_lengths`` that token t belongs to;
    ``sequence_lengths`` [B_local] integer, the number of response tokens of each *whole* sequence,
    also where this rank holds only a part of it. Any leading shape may stand in place of [T];
    returns that shape, in ``dtype``.

    Gradient: none.

    Edge cases: a sequence without response tokens counts neither in B nor in N, and its tokens get
    weight 0. B = 0 gives weights of 0. Negative counts, an unknown ``aggregation`` and integer
    tensors that are none raise ``ValueError``.

    Source: predictive divergence masks, Eq. 14 (token sums); section 7 of the design.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(
            f"token_weights: aggregation must be one of {get_args(Aggregation)}, got "
            f"{aggregation!r}"
        )
    if global_tokens < 0 or global_sequences < 0:
        raise ValueError(
            "token_weights: global_tokens and global_sequences must not be negative, got "
            f"{global_tokens} and {global_sequences}"
        )
    for name, tensor in (("sequence_ids", sequence_ids), ("sequence_lengths", sequence_lengths)):
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"token_weights: {name} must be integers, got {tensor.dtype}")
    if sequence_lengths.dim() != 1:
        raise ValueError(
            "token_weights: sequence_lengths must be [B], got shape "
            f"{tuple(sequence_lengths.shape)}"
        )
    if aggregation == "token_mean":
        return torch.ones(sequence_ids.shape, dtype=dtype, device=sequence_ids.device)
    lengths = sequence_lengths[sequence_ids.long()]
    # float64, since N / (B * length) mixes counts up to 1e8 and is made once per batch.
    denominator = (lengths * global_sequences).double()
    weights = global_tokens / torch.where(denominator > 0, denominator, 1.0)
    return torch.where(denominator > 0, weights, 0.0).to(dtype)
