# SPDX-License-Identifier: Apache-2.0
"""The masked policy loss: choose a mask, a divergence and a direction, and get a gradient."""

from pdm.loss.acceptance import accept_sequences
from pdm.loss.config import PolicyLossConfig, resolve_mask
from pdm.loss.fused import FusedPolicyLoss, fused_policy_loss
from pdm.loss.policy_loss import PolicyLossResult, policy_loss, raise_on_non_finite

__all__ = [
    "FusedPolicyLoss",
    "PolicyLossConfig",
    "PolicyLossResult",
    "accept_sequences",
    "fused_policy_loss",
    "policy_loss",
    "raise_on_non_finite",
    "resolve_mask",
]
