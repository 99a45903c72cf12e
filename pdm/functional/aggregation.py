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

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_fixed"]


def token_weights(
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    *,
    aggregation: Aggregation,
    global_tokens: int,
    global_sequences: int,
    fixed_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the weights w_t for which sum_t w_t l_t / N is the chosen mean.

    - ``"token_mean"``, all tokens alike: w_t = 1
    - ``"sequence_mean"``, the mean over sequences of each one's mean over its tokens:
      w_t = N / (B * length of the sequence of t)
    - ``"sequence_sum_fixed"``, the mean over sequences of each one's sum over its tokens, divided
      by one fixed length, so that a token weighs the same in a short and in a long response:
      w_t = N / (B * ``fixed_length``)

    with N = ``global_tokens`` and B = ``global_sequences`` of the whole global batch (all
    micro-batches, all data-parallel ranks).

    Shapes: ``sequence_ids`` [T] integer, row of ``sequence_lengths`` that token t belongs to;
    ``sequence_lengths`` [B_local] integer, the number of response tokens of each *whole* sequence,
    also where this rank holds only a part of it. Any leading shape may stand in place of [T];
    returns that shape, in ``dtype``.

    Gradient: none.

    Edge cases: a sequence without response tokens counts neither in B nor in N, and its tokens get
    weight 0. B = 0 gives weights of 0. Negative counts, an unknown ``aggregation``, integer tensors
    that are none, and a ``fixed_length`` that is missing, below 1 or without effect raise
    ``ValueError``.

    Source: predictive divergence masks, Eq. 14 (token sums); section 5 of docs/method.md;
    "sequence_sum_fixed" as in Liu et al., 2025 (Dr. GRPO).
    """
    require_fixed_length("token_weights", aggregation, fixed_length)
    _check_arguments(sequence_ids, sequence_lengths, global_tokens, global_sequences)
    if aggregation == "token_mean":
        return torch.ones(sequence_ids.shape, dtype=dtype, device=sequence_ids.device)
    lengths = sequence_lengths[sequence_ids.long()]
    if fixed_length is not None:
        lengths = torch.where(lengths > 0, fixed_length, 0)
    # float64, since N / (B * length) mixes counts up to 1e8 and is made once per batch.
    denominator = lengths.double() * global_sequences
    weights = global_tokens / torch.where(denominator > 0, denominator, 1.0)
    return torch.where(denominator > 0, weights, 0.0).to(dtype)


def require_fixed_length(where: str, aggregation: str, fixed_length: int | None) -> None:
    """Raise ``ValueError`` unless ``aggregation`` is known and has the fixed length it needs.

    Shapes: none; ``where`` names the caller in the message.

    Source: section 5 of docs/method.md.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(
            f"{where}: aggregation must be one of {get_args(Aggregation)}, got {aggregation!r}"
        )
    if aggregation != "sequence_sum_fixed":
        if fixed_length is not None:
            raise ValueError(
                f"{where}: fixed_length={fixed_length!r} has no effect with "
                f"aggregation={aggregation!r}; leave it out, or set "
                "aggregation='sequence_sum_fixed'"
            )
        return
    is_int = isinstance(fixed_length, int) and not isinstance(fixed_length, bool)
    if not is_int or fixed_length < 1:  # type: ignore[operator]
        raise ValueError(
            f"{where}: aggregation='sequence_sum_fixed' needs fixed_length, an integer of at least "
            f"1 such as the longest response allowed, got {fixed_length!r}"
        )


def _check_arguments(
    sequence_ids: Tensor, sequence_lengths: Tensor, global_tokens: int, global_sequences: int
) -> None:
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
