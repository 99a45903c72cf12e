# SPDX-License-Identifier: Apache-2.0
"""The method as pure functions: tensors in, tensors out."""

from pdm.functional.advantages import group_advantages
from pdm.functional.aggregation import token_weights
from pdm.functional.certified_direction import (
    CertifiedDirection,
    certified_kl_direction,
    kl_direction_bounds,
)
from pdm.functional.directions import (
    binary_kl_direction,
    binary_tv_direction,
    kl_direction,
    kl_direction_full,
    ratio_direction,
    tv_direction,
    tv_direction_full,
)
from pdm.functional.divergences import binary_kl, binary_tv, full_kl, full_tv, topk_kl, topk_tv
from pdm.functional.error_bounds import ErrorBounds, accepted_error_bound, error_bounds
from pdm.functional.penalties import reference_kl, reference_kl_slope
from pdm.functional.sequence_acceptance import (
    LengthCounts,
    SequenceMaskResult,
    acceptance_by_length,
    expand_to_tokens,
)
from pdm.functional.sequence_mask_config import SequenceMaskConfig, sequence_mask
from pdm.functional.sequence_masks import ln_trm_mask, sampled_trm_mask, ser_mask, trm_mask
from pdm.functional.token_masks import (
    MaskCounts,
    MaskResult,
    divergence_mask,
    mask_counts,
    ratio_clip_mask,
)

__all__ = [
    "CertifiedDirection",
    "ErrorBounds",
    "LengthCounts",
    "MaskCounts",
    "MaskResult",
    "SequenceMaskConfig",
    "SequenceMaskResult",
    "acceptance_by_length",
    "accepted_error_bound",
    "binary_kl",
    "binary_kl_direction",
    "binary_tv",
    "binary_tv_direction",
    "certified_kl_direction",
    "divergence_mask",
    "error_bounds",
    "expand_to_tokens",
    "full_kl",
    "full_tv",
    "group_advantages",
    "kl_direction",
    "kl_direction_bounds",
    "kl_direction_full",
    "ln_trm_mask",
    "mask_counts",
    "ratio_clip_mask",
    "ratio_direction",
    "reference_kl",
    "reference_kl_slope",
    "sampled_trm_mask",
    "sequence_mask",
    "ser_mask",
    "token_weights",
    "topk_kl",
    "topk_tv",
    "trm_mask",
    "tv_direction",
    "tv_direction_full",
]
