# SPDX-License-Identifier: Apache-2.0
"""Keeping near a reference policy: per-token estimates of the KL from sampled log-probabilities."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from pdm.functional.probabilities import exp_remainder

KlEstimator = Literal["k2", "k3"]


def reference_kl(
    policy_log_prob: Tensor, reference_log_prob: Tensor, estimator: KlEstimator = "k3"
) -> Tensor:
    """Estimate how far the policy is from a reference, from the sampled token alone.

    With x = log pi_k - log ref_k:

    - ``"k3"``: exp(-x) - 1 + x. Its mean under pi is KL(pi ‖ ref); the mean of its *gradient* under
      pi is the gradient of KL(ref ‖ pi). The penalty of GRPO.
    - ``"k2"``: x^2 / 2. Its mean is KL(pi ‖ ref) to second order only; the mean of its gradient
      under pi is exactly the gradient of KL(pi ‖ ref).

    Shapes: the log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it; see ``reference_kl_slope``.

    Edge cases: never negative, 0 at equality, and accurate near it; +inf where exp(-x) overflows.
    NaN stays NaN. An unknown ``estimator`` raises ``ValueError``.

    Source: Schulman, 2020, Approximating KL divergence; "k3" as in Shao et al., 2024 (GRPO).
    """
    _require_estimator("reference_kl", estimator)
    distance = policy_log_prob - reference_log_prob
    return exp_remainder(distance) if estimator == "k3" else 0.5 * distance.square()


def reference_kl_slope(
    policy_log_prob: Tensor, reference_log_prob: Tensor, estimator: KlEstimator = "k3"
) -> Tensor:
    """Compute the derivative of ``reference_kl`` by log pi_k.

    1 - exp(-x) for ``"k3"``, x for ``"k2"``, with x = log pi_k - log ref_k.

    Shapes: the log-probabilities of the sampled token [T]; returns [T] in the wider dtype.

    Gradient: flows into an argument that requires it.

    Edge cases: -inf where exp(-x) overflows. NaN stays NaN. An unknown ``estimator`` raises
    ``ValueError``.

    Source: the estimators of ``reference_kl``, differentiated.
    """
    _require_estimator("reference_kl_slope", estimator)
    distance = policy_log_prob - reference_log_prob
    return -torch.expm1(-distance) if estimator == "k3" else distance


def _require_estimator(function: str, estimator: str) -> None:
    if estimator not in get_args(KlEstimator):
        raise ValueError(
            f"{function}: estimator must be one of {get_args(KlEstimator)}, got {estimator!r}"
        )
