# SPDX-License-Identifier: Apache-2.0
"""From the statistics of a micro-batch to the verdict on its sequences."""

from __future__ import annotations

from torch import Tensor

from pdm.functional.divergences import topk_kl, topk_tv
from pdm.functional.sequence_acceptance import SequenceMaskResult
from pdm.functional.sequence_mask_config import SequenceMaskConfig, sequence_mask
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport


def accept_sequences(
    config: SequenceMaskConfig,
    stats: PolicyStatistics,
    support: BehaviorSupport,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    trained: Tensor | None = None,
) -> SequenceMaskResult:
    """Apply a sequence mask to whole sequences whose policy statistics are at hand.

    Formulas: those of ``sequence_mask``, over KL(behavior || policy) or TV on the top-K support, or
    over the sampled tokens' ratios.

    Shapes: statistics and support of T tokens, ``sequence_ids`` [T] integer in 0 .. B - 1 with
    B = ``num_sequences``, ``trained`` [T] bool (None: all). Returns tensors [B]; give
    ``expand_to_tokens(result.accept, sequence_ids)`` to ``policy_loss`` as ``accepted``.

    Gradient: none.

    Edge cases: those of the masks. A full-vocabulary divergence is not in the statistics and raises
    ``ValueError``.

    Source: trust region masking, section 4.3 and Appendix F.
    """
    if config.divergence in ("full_kl", "full_tv"):
        raise ValueError(
            f"accept_sequences: divergence={config.divergence!r} needs the behavior policy's whole "
            "distribution, which rollouts do not hold; use topk_kl or topk_tv"
        )
    divergence = None
    if config.needs_divergence:
        measure = topk_kl if config.divergence == "topk_kl" else topk_tv
        divergence = measure(support, stats)
    return sequence_mask(
        config,
        sequence_ids,
        num_sequences,
        behavior_log_prob=support.sampled_log_probs,
        policy_log_prob=stats.log_prob.detach(),
        divergence=divergence,
        tv=topk_tv(support, stats) if config.needs_tv else None,
        trained=trained,
    )
