# SPDX-License-Identifier: Apache-2.0
"""Sequence masks: a sequence that leaves the trust region anywhere is rejected as a whole.

They act on top of a token mask: ``mask.keep & expand_to_tokens(result.accept, sequence_ids)``.
A rejected token still counts in the denominators, like a vetoed one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdm.functional.error_bounds import context_shift
from pdm.functional.sequence_acceptance import SequenceMaskResult
from pdm.functional.sequence_rows import SequenceRows, group_rows


def trm_mask(
    divergence: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    max_threshold: float | None = None,
    average_threshold: float | None = None,
    trained: Tensor | None = None,
) -> SequenceMaskResult:
    """Reject sequences by the largest or the mean divergence of their tokens, or by both.

    accept = [max_t D_t <= max_threshold] and [(1/T) sum_t D_t <= average_threshold]; a threshold
    that is None does not apply. One of them gives the max or the average criterion, both the
    combined one.

    D is KL(behavior || policy), full or top-K, or the total variation. Only the maximum of the
    *full* divergence over *all* contexts enters the error bounds; that of a top-K one, or over
    what happened to be sampled, is a lower bound and certifies nothing by itself. The average
    criterion certifies less still: one bad token among many passes it.

    Shapes: ``divergence`` [T] floating, not negative; ``sequence_ids`` [T] integer in
    0 .. ``num_sequences`` - 1, rows in any order, every sequence whole; ``trained`` [T] bool, the
    response tokens (None: all), the others do not count, and may hold anything. Any leading shape
    may stand in place of [T]. Returns tensors [B], the score in float64 for float64 input and in
    float32 otherwise; sums are taken in float64.

    Gradient: none.

    Edge cases: a statistic equal to its threshold is accepted. A NaN or -inf at any token rejects
    its sequence, and marks it invalid; +inf rejects it. A negative divergence (rounding) counts as
    0. A sequence without tokens is accepted with score 0, and not counted by the rates. T = 0 and
    B = 0 give empty results. No threshold, thresholds that are not finite and above 0, wrong
    shapes, dtypes and ids raise ``ValueError``.

    Source: trust region masking, section 4.3 (max, average and combined criterion).
    """
    name = "trm_mask"
    _check_thresholds(name, max_threshold, average_threshold)
    _check_values(name, sequence_ids, divergence=divergence)
    rows = group_rows(name, sequence_ids, num_sequences, trained)
    values = divergence.detach().reshape(-1).double()
    return _trm(rows, values, values, max_threshold, average_threshold, _dtype(divergence))


def sampled_trm_mask(
    behavior_log_prob: Tensor,
    policy_log_prob: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    max_threshold: float | None = None,
    average_threshold: float | None = None,
    trained: Tensor | None = None,
) -> SequenceMaskResult:
    """Reject sequences by estimates of the divergence from the sampled tokens alone.

    accept = [max_t k2(rho_t) <= max_threshold] and [(1/T) sum_t k3(rho_t) <= average_threshold];
    a threshold that is None does not apply. k2 sees rho -> 0 and rho -> inf alike, k3 is an
    unbiased estimate of KL(behavior || policy). An estimate bounds no divergence, hence nothing is
    certified.

    Shapes: both log-probabilities of the sampled token [T]; the rest as in ``trm_mask``.

    Gradient: none.

    Edge cases: as in ``trm_mask``; a token that one side calls impossible (-inf) has an infinite
    estimate and rejects its sequence, one that both call impossible is garbage (NaN).

    Source: trust region masking, section 4.3 (sample-based approximation).
    """
    name = "sampled_trm_mask"
    _check_thresholds(name, max_threshold, average_threshold)
    log_ratio = _log_ratio(name, behavior_log_prob, policy_log_prob, sequence_ids)
    rows = group_rows(name, sequence_ids, num_sequences, trained)
    dtype = _dtype(behavior_log_prob, policy_log_prob)
    return _trm(rows, _k2(log_ratio), _k3(log_ratio), max_threshold, average_threshold, dtype)


def ln_trm_mask(
    behavior_log_prob: Tensor,
    policy_log_prob: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    threshold: float,
    kl_max: float,
    tv_max: float | None = None,
    trained: Tensor | None = None,
) -> SequenceMaskResult:
    """Reject sequences by their weighted mean ratio error, without a bias against long ones.

    accept = [W / Z <= threshold], W = sum_t |rho_t - 1| w_t, Z = sum_t w_t,
    w_t = min(1, (T - t) tv_max, sqrt((T - t) kl_max / 2)), T the sequence's own length.

    Where the full divergences are at most kl_max and tv_max at all contexts, |Error| <= 2 E[W] for
    rewards in [0, 1], and an accepted sequence has W <= threshold Z(T). Neither follows from the
    sampled ratios alone.

    Shapes: both log-probabilities of the sampled token [T], the rows of each sequence in the order
    of its tokens; the rest as in ``trm_mask``. ``tv_max`` None leaves it to Pinsker's inequality.

    Gradient: none.

    Edge cases: as in ``trm_mask``. The last token has weight 0, and a sequence of one token is
    accepted; but NaN and an infinite ratio reject also there, since such a token cannot be trained
    on. ``kl_max`` and ``tv_max`` that are not finite and above 0 raise ``ValueError``.

    Source: trust region masking, Appendix F.2 (LN-TRM).
    """
    name = "ln_trm_mask"
    _check_positive(name, "threshold", threshold)
    _check_positive(name, "kl_max", kl_max)
    if tv_max is not None:
        _check_positive(name, "tv_max", tv_max)
    log_ratio = _log_ratio(name, behavior_log_prob, policy_log_prob, sequence_ids)
    rows = group_rows(name, sequence_ids, num_sequences, trained)
    weights = context_shift(rows.steps_after(), kl_max, tv_max)
    excess = torch.expm1(log_ratio).abs()
    # 0 * inf, at the last token, would be NaN; it is as infinite as elsewhere.
    error, invalid = _split_garbage(torch.where(excess.isinf(), excess, excess * weights), rows)
    norm = rows.total(weights)
    statistic = rows.total(error) / torch.where(norm > 0.0, norm, 1.0)
    dtype = _dtype(behavior_log_prob, policy_log_prob)
    return _judge(statistic.to(dtype), threshold, rows, invalid)


def ser_mask(
    behavior_log_prob: Tensor,
    policy_log_prob: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    threshold: float,
    trained: Tensor | None = None,
) -> SequenceMaskResult:
    """Reject sequences by their sequence-error ratio, the mean of |rho_t - 1|.

    accept = [(1/T) sum_t |rho_t - 1| <= threshold].

    LN-TRM with all weights 1. Bounds no divergence at unseen contexts, hence certifies nothing by
    itself.

    Shapes: both log-probabilities of the sampled token [T]; the rest as in ``trm_mask``.

    Gradient: none.

    Edge cases: as in ``trm_mask``; a token that the policy calls impossible has |rho - 1| = 1, one
    that only the behaviour calls impossible an infinite one.

    Source: trust region masking, Appendix F.3 (SER).
    """
    name = "ser_mask"
    _check_positive(name, "threshold", threshold)
    log_ratio = _log_ratio(name, behavior_log_prob, policy_log_prob, sequence_ids)
    rows = group_rows(name, sequence_ids, num_sequences, trained)
    error, invalid = _split_garbage(torch.expm1(log_ratio).abs(), rows)
    dtype = _dtype(behavior_log_prob, policy_log_prob)
    return _judge(_average(error, rows).to(dtype), threshold, rows, invalid)


def _trm(
    rows: SequenceRows,
    max_values: Tensor,
    average_values: Tensor,
    max_threshold: float | None,
    average_threshold: float | None,
    dtype: torch.dtype,
) -> SequenceMaskResult:
    results = []
    if max_threshold is not None:
        values, invalid = _split_garbage(max_values, rows)
        results.append(_judge(rows.largest(values).to(dtype), max_threshold, rows, invalid))
    if average_threshold is not None:
        values, invalid = _split_garbage(average_values, rows)
        results.append(_judge(_average(values, rows).to(dtype), average_threshold, rows, invalid))
    return results[0] if len(results) == 1 else results[0] & results[1]


def _judge(
    statistic: Tensor, threshold: float, rows: SequenceRows, invalid: Tensor
) -> SequenceMaskResult:
    """Compare a statistic [B] with its threshold, in the statistic's dtype like the token masks."""
    score = (statistic.double() / threshold).to(statistic.dtype)
    return SequenceMaskResult(
        accept=(statistic <= threshold) & ~invalid,
        score=torch.where(invalid, torch.nan, score),
        lengths=rows.lengths,
        invalid=invalid,
    )


def _split_garbage(values: Tensor, rows: SequenceRows) -> tuple[Tensor, Tensor]:
    """Usable values [T] >= 0, and which sequences [B] held others.

    Said in words rather than left to how each reduction kernel treats a NaN.
    """
    garbage = values.isnan() | (values == -torch.inf)
    return torch.where(garbage, 0.0, values).clamp_min(0.0), rows.any(garbage)


def _average(values: Tensor, rows: SequenceRows) -> Tensor:
    return rows.total(values) / rows.lengths.clamp_min(1)


def _log_ratio(
    caller: str, behavior_log_prob: Tensor, policy_log_prob: Tensor, sequence_ids: Tensor
) -> Tensor:
    """log rho [T] in float64, where exp overflows only far beyond any threshold."""
    _check_values(
        caller,
        sequence_ids,
        behavior_log_prob=behavior_log_prob,
        policy_log_prob=policy_log_prob,
    )
    return (policy_log_prob.detach().double() - behavior_log_prob.detach().double()).reshape(-1)


def _k2(log_ratio: Tensor) -> Tensor:
    """(log rho)^2 / 2."""
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    """rho - 1 - log rho; infinite, not NaN, at rho = inf."""
    k3 = torch.expm1(log_ratio) - log_ratio
    return torch.where(log_ratio == torch.inf, torch.inf, k3)


def _dtype(*tensors: Tensor) -> torch.dtype:
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _check_thresholds(
    caller: str, max_threshold: float | None, average_threshold: float | None
) -> None:
    if max_threshold is None and average_threshold is None:
        raise ValueError(f"{caller}: give max_threshold, average_threshold or both, got neither")
    if max_threshold is not None:
        _check_positive(caller, "max_threshold", max_threshold)
    if average_threshold is not None:
        _check_positive(caller, "average_threshold", average_threshold)


def _check_positive(caller: str, name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{caller}: {name} must be finite and above 0, got {value}")


def _check_values(caller: str, sequence_ids: Tensor, **values: Tensor) -> None:
    for name, tensor in values.items():
        if tensor.shape != sequence_ids.shape or not tensor.is_floating_point():
            raise ValueError(
                f"{caller}: {name} must be floating and of shape {tuple(sequence_ids.shape)}, like "
                f"sequence_ids, got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
