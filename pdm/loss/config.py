# SPDX-License-Identifier: Apache-2.0
"""The settings of the policy loss, checked when they are made."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from pdm.functional.aggregation import Aggregation, require_fixed_length
from pdm.functional.penalties import KlEstimator
from pdm.functional.sequence_mask_config import SequenceMaskConfig
from pdm.functional.token_masks import MaskResult
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport

MaskName = Literal["none", "ratio_clip", "divergence"]
Divergence = Literal["topk_kl", "topk_tv", "binary_kl", "binary_tv"]
Direction = Literal["ratio", "aggregated", "uniform", "exact", "certified"]
NonFinite = Literal["raise", "drop"]
MaskFunction = Callable[[PolicyStatistics, BehaviorSupport, Tensor], MaskResult]

_BINARY_DIRECTIONS = ("ratio", "aggregated")


@dataclass(frozen=True)
class PolicyLossConfig:
    """Settings of ``policy_loss``. A wrong value raises ``ValueError`` that names the setting.

    A setting of a mask that is not chosen only changes what is reported, not the loss.
    """

    mask: str = "divergence"
    """"divergence" (DPPO and predictive masks), "ratio_clip" (PPO, GRPO), "none", or the import
    path of a function (stats, support, advantages) -> MaskResult: "package.module:function" or
    "package.module.function"."""

    divergence: Divergence = "topk_kl"
    """Which divergence is compared with the threshold, and reported: the KL or the total variation
    (tv), on the top-K support or on {sampled token, everything else} (binary)."""

    direction: Direction = "uniform"
    """What says outward: "ratio" (with topk_kl: DPPO-TopK), or the derivative of the divergence
    with an "aggregated", "uniform" or "exact" tail. "certified", for topk_kl only: the sign of the
    full KL's derivative where it is proven, and reported where. The binary divergences take "ratio"
    and "aggregated", which agree there."""

    threshold: float = 0.15
    """Divergence above which a token is outside the trust region; nats for a KL, and below 1 for a
    total variation."""

    clip_low: float = 0.2
    """ratio_clip: outside below r = 1 - clip_low."""

    clip_high: float = 0.28
    """ratio_clip: outside above r = 1 + clip_high."""

    ratio_cap: float | None = None
    """Largest ratio that enters the gradient of a kept token, above 1; None for no cap."""

    dual_clip: float | None = None
    """Dual-clip PPO: a token with A < 0 and a ratio above this (above 1, usually 3) gets no policy
    gradient, on top of any mask; None for no such limit."""

    kl_coefficient: float = 0.0
    """Weight of the penalty for leaving the reference policy; above 0 needs
    ``reference_log_prob``."""

    kl_estimator: KlEstimator = "k3"
    """How the penalty is estimated: "k3" (GRPO) or "k2"; see ``reference_kl``."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; above 0 needs statistics made with ``entropy_gradient=True``."""

    non_finite: NonFinite = "raise"
    """What to do about a token that would put NaN or an infinity into the gradient: "raise" an
    error that names its position, or "drop" it from the loss (not from the token count) and count
    it."""

    aggregation: Aggregation = "token_mean"
    """Which mean over tokens the weights stand for; all but token_mean need ``weights``."""

    sequence_mask: SequenceMaskConfig | None = None
    """Trust region masking: whole sequences that are rejected, on top of the token mask. Make the
    verdict with ``accept_sequences`` and give it to ``policy_loss`` as ``accepted``."""

    fixed_length: int | None = None
    """sequence_sum_fixed: the length that every sequence's sum is divided by, an argument of
    ``token_weights``."""

    def __post_init__(self) -> None:
        _require_choice("divergence", self.divergence, get_args(Divergence))
        _require_choice("direction", self.direction, get_args(Direction))
        _require_choice("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        _require_choice("non_finite", self.non_finite, get_args(NonFinite))
        limit = 1.0 if self.divergence.endswith("_tv") else math.inf
        _require_number("threshold", self.threshold, above=0.0, below=limit)
        _require_number("clip_low", self.clip_low, above=0.0, below=1.0)
        _require_number("clip_high", self.clip_high, above=0.0)
        for name in ("ratio_cap", "dual_clip"):
            if getattr(self, name) is not None:
                _require_number(name, getattr(self, name), above=1.0)
        for name in ("kl_coefficient", "entropy_coefficient"):
            if getattr(self, name) != 0:
                _require_number(name, getattr(self, name), above=0.0)
        require_fixed_length("PolicyLossConfig", self.aggregation, self.fixed_length)
        self._check_direction()
        if not isinstance(self.mask, str):
            raise ValueError(
                f"PolicyLossConfig: mask must be one of {get_args(MaskName)} or the import path of "
                f"a function, got {self.mask!r}"
            )
        if self.mask not in get_args(MaskName):
            # Now rather than after the first rollout.
            resolve_mask(self.mask)

    def _check_direction(self) -> None:
        if self.divergence.startswith("binary_") and self.direction not in _BINARY_DIRECTIONS:
            raise ValueError(
                f"PolicyLossConfig: divergence={self.divergence!r} has no tail to model and takes "
                f"direction 'ratio' or 'aggregated', got {self.direction!r}; change direction, or "
                f"set divergence={self.divergence.replace('binary', 'topk')!r}"
            )
        if self.divergence == "topk_tv" and self.direction == "certified":
            raise ValueError(
                "PolicyLossConfig: direction='certified' bounds the derivative of the full KL. "
                "That of the full total variation depends on the sign of mu_j - pi_j of every "
                "unseen token, which no rollout tells; set direction='exact', or "
                "divergence='topk_kl'"
            )


@functools.cache
def resolve_mask(path: str) -> MaskFunction:
    """Import the mask function at ``path``, "package.module:function" or with a last dot.

    Errors: ``ValueError`` when the path has neither form, the module cannot be imported, or it
    holds no such callable.
    """
    separator = ":" if ":" in path else "."
    module_name, _, function_name = path.rpartition(separator)
    names = [*module_name.split("."), function_name]
    if not all(name.isidentifier() for name in names):
        raise ValueError(
            f"PolicyLossConfig: mask must be one of {get_args(MaskName)} or an import path such as "
            f"'package.module:function', got {path!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"PolicyLossConfig: mask={path!r}: cannot import {module_name!r}: {error}"
        ) from error
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(
            f"PolicyLossConfig: mask={path!r}: expected a function {function_name!r} in "
            f"{module_name!r}, got {function!r}"
        )
    resolved: MaskFunction = function
    return resolved


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"PolicyLossConfig: {name} must be one of {choices}, got {value!r}")


def _require_number(name: str, value: object, *, above: float, below: float = math.inf) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and above < value < below):  # type: ignore[operator]
        limit = "" if below == math.inf else f" and below {below}"
        wanted = f"a finite number above {above}{limit}"
        raise ValueError(f"PolicyLossConfig: {name} must be {wanted}, got {value!r}")
