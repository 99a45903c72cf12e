# SPDX-License-Identifier: Apache-2.0
"""Predictive divergence masks for policy-gradient training of language models; torch only."""

from pdm.functional import (
    MaskResult,
    binary_kl,
    binary_kl_direction,
    divergence_mask,
    group_advantages,
    kl_direction,
    ratio_clip_mask,
    ratio_direction,
    token_weights,
    topk_kl,
)
from pdm.loss import PolicyLossConfig, PolicyLossResult, policy_loss
from pdm.statistics import PolicyStatistics, policy_statistics
from pdm.support import BehaviorSupport
from pdm.vocab_parallel import VocabShard

__all__ = [
    "BehaviorSupport",
    "MaskResult",
    "PolicyLossConfig",
    "PolicyLossResult",
    "PolicyStatistics",
    "VocabShard",
    "binary_kl",
    "binary_kl_direction",
    "divergence_mask",
    "group_advantages",
    "kl_direction",
    "policy_loss",
    "policy_statistics",
    "ratio_clip_mask",
    "ratio_direction",
    "token_weights",
    "topk_kl",
]
