# SPDX-License-Identifier: Apache-2.0
"""The method as pure functions: tensors in, tensors out."""

from pdm.functional.advantages import group_advantages
from pdm.functional.aggregation import token_weights
from pdm.functional.directions import binary_kl_direction, kl_direction, ratio_direction
from pdm.functional.divergences import binary_kl, topk_kl
from pdm.functional.token_masks import MaskResult, divergence_mask, ratio_clip_mask

__all__ = [
    "MaskResult",
    "binary_kl",
    "binary_kl_direction",
    "divergence_mask",
    "group_advantages",
    "kl_direction",
    "ratio_clip_mask",
    "ratio_direction",
    "token_weights",
    "topk_kl",
]
