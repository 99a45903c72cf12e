# SPDX-License-Identifier: Apache-2.0
"""The masked policy loss: choose a mask, a divergence and a direction, and get a gradient."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pdm.functional.aggregation import Aggregation
from pdm.functional.directions import binary_kl_direction, kl_direction, ratio_direction
from pdm.functional.divergences import binary_kl, topk_kl
from pdm.functional.token_masks import MaskResult, divergence_mask, ratio_clip_mask
from pdm.statistics import PolicyStatistics
from pdm.support import BehaviorSupport

MaskName = Literal["none", "ratio_clip", "divergence"]
Divergence = Literal["topk_kl", "binary_kl"]
Direction = Literal["ratio", "aggregated", "uniform", "exact"]
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
    """Which divergence is compared with the threshold, and reported."""

    direction: Direction = "uniform"
    """What says outward: "ratio" (with topk_kl: DPPO-TopK), or the derivative of the divergence
    with an "aggregated", "uniform" or "exact" tail. binary_kl takes "ratio" and "aggregated"."""

    threshold: float = 0.15
    """Divergence, in nats, above which a token is outside the trust region."""

    clip_low: float = 0.2
    """ratio_clip: outside below r = 1 - clip_low."""

    clip_high: float = 0.28
    """ratio_clip: outside above r = 1 + clip_high."""

    ratio_cap: float | None = None
    """Largest ratio that enters the gradient of a kept token, above 1; None for no cap."""

    aggregation: Aggregation = "token_mean"
    """Which mean over tokens the weights stand for; all but token_mean need ``weights``."""

    def __post_init__(self) -> None:
        _require_choice("divergence", self.divergence, get_args(Divergence))
        _require_choice("direction", self.direction, get_args(Direction))
        _require_choice("aggregation", self.aggregation, get_args(Aggregation))
        _require_number("threshold", self.threshold, above=0.0)
        _require_number("clip_low", self.clip_low, above=0.0, below=1.0)
        _require_number("clip_high", self.clip_high, above=0.0)
        if self.ratio_cap is not None:
            _require_number("ratio_cap", self.ratio_cap, above=1.0)
        if self.divergence == "binary_kl" and self.direction not in _BINARY_DIRECTIONS:
            raise ValueError(
                f"PolicyLossConfig: divergence='binary_kl' has no tail to model and takes "
                f"direction 'ratio' or 'aggregated', got {self.direction!r}; change direction, or "
                "set divergence='topk_kl'"
            )
        if not isinstance(self.mask, str):
            raise ValueError(
                f"PolicyLossConfig: mask must be one of {get_args(MaskName)} or the import path of "
                f"a function, got {self.mask!r}"
            )
        if self.mask not in get_args(MaskName):
            # Now rather than after the first rollout.
            resolve_mask(self.mask)


@dataclass(frozen=True, eq=False)
class PolicyLossResult:
    """The loss and what it was made of.

    - ``loss`` []: sum of w_t l_t; the only field that carries a gradient
    - ``num_tokens`` [] int64: number of trained tokens, vetoed ones included
    - ``mask`` [T] bool: on tokens that are not trained keep is true, outside and outward are false
    - ``log_ratio`` [T] log pi - log mu, ``ratio`` [T] its exponential, uncapped
    - ``capped`` [T] bool: tokens whose ratio was cut to ``ratio_cap`` in the gradient
    - ``divergence``, ``direction`` [T]: as configured, whatever the mask

    On tokens that are not trained ``ratio`` is 1 and the other numbers are 0, so that sums over
    all tokens are sums over the trained ones.
    """

    loss: Tensor
    num_tokens: Tensor
    mask: MaskResult
    log_ratio: Tensor
    ratio: Tensor
    capped: Tensor
    divergence: Tensor
    direction: Tensor


def policy_loss(
    stats: PolicyStatistics,
    support: BehaviorSupport,
    advantages: Tensor,
    config: PolicyLossConfig,
    *,
    weights: Tensor | None = None,
    trained: Tensor | None = None,
) -> PolicyLossResult:
    """Compute the masked policy loss of a set of tokens, as a sum.

    loss = sum_t w_t l_t, l_t = -M_t r_t A_t, r_t = exp(log pi_k - log mu_k), M_t in {0, 1}.
    It is not divided by anything; the trainer divides once, by the global number of tokens.

    Shapes: statistics and support of the same T tokens, ``advantages`` [T]; ``weights`` [T] per
    token (None: all 1, only for ``aggregation="token_mean"``); ``trained`` [T] bool, the response
    tokens (None: all). Any leading shape may stand in place of [T]. The loss has the dtype of
    ``stats.log_prob``.

    Gradient: exactly -w_t M_t min(r_t, ratio_cap) A_t grad log pi_k, through ``stats.log_prob``;
    the mask and the cap are constants to it. Every other field is detached.

    Edge cases: a token that is vetoed, not trained, or has A_t = 0 or w_t = 0 adds exactly 0 to
    the loss and to the gradient, whatever else it holds, NaN and infinities included. On a token
    that is trained and kept, a NaN or an overflowing ratio shows in the loss. With nothing kept,
    the loss is 0 and still back-propagates zeros. Wrong shapes or dtypes, and weights that the
    aggregation needs but did not get, raise ``ValueError``.

    Source: predictive divergence masks, Eq. 4, 13 and 14.
    """
    _check_arguments(stats, support, advantages, config, weights, trained)
    # Nothing but log_prob may carry a gradient, a custom mask's inputs included.
    fixed = replace(stats, log_prob=stats.log_prob.detach(), entropy=stats.entropy.detach())
    advantages = advantages.detach().to(fixed.log_prob.dtype)
    if trained is None:
        trained = torch.ones_like(advantages, dtype=torch.bool)

    log_ratio = fixed.log_prob - support.sampled_log_probs
    divergence = _divergence(config, fixed, support)
    direction = _direction(config, fixed, support)
    mask = _mask(config, fixed, support, advantages, divergence, direction)

    active = mask.keep & trained & (advantages != 0)
    scale = -advantages
    if weights is not None:
        weights = weights.detach().to(advantages.dtype)
        active = active & (weights != 0)
        scale = scale * weights
    # Every factor of an inactive token is replaced, not multiplied by 0: 0 * inf is NaN, and
    # where() behind an exp still hands 0 * inf to the gradient. So neutralise before each exp.
    ratio = torch.where(active, log_ratio, 0.0).exp()
    capped = torch.zeros_like(active)
    if config.ratio_cap is not None:
        capped = ratio > config.ratio_cap
        ratio = ratio.clamp_max(config.ratio_cap)
    coefficient = torch.where(active, scale * ratio, 0.0)
    log_prob = torch.where(active, stats.log_prob, 0.0)
    # exp(x - x.detach()) is 1 with gradient 1: the coefficient is the whole gradient.
    loss = (coefficient * torch.exp(log_prob - log_prob.detach())).sum()

    log_ratio = torch.where(trained, log_ratio, 0.0)
    return PolicyLossResult(
        loss=loss,
        num_tokens=trained.sum(),
        mask=MaskResult(
            keep=mask.keep | ~trained,
            outside=mask.outside & trained,
            outward=mask.outward & trained,
        ),
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        capped=capped,
        divergence=torch.where(trained, divergence, 0.0),
        direction=torch.where(trained, direction, 0.0),
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


def _divergence(
    config: PolicyLossConfig, stats: PolicyStatistics, support: BehaviorSupport
) -> Tensor:
    if config.divergence == "binary_kl":
        return binary_kl(support.sampled_log_probs, stats.log_prob)
    return topk_kl(support, stats)


def _direction(
    config: PolicyLossConfig, stats: PolicyStatistics, support: BehaviorSupport
) -> Tensor:
    if config.direction == "ratio":
        return ratio_direction(support.sampled_log_probs, stats.log_prob)
    if config.divergence == "binary_kl":
        return binary_kl_direction(support.sampled_log_probs, stats.log_prob)
    return kl_direction(support, stats, tail=config.direction)


def _mask(
    config: PolicyLossConfig,
    stats: PolicyStatistics,
    support: BehaviorSupport,
    advantages: Tensor,
    divergence: Tensor,
    direction: Tensor,
) -> MaskResult:
    if config.mask == "none":
        return MaskResult.keep_all(advantages)
    if config.mask == "divergence":
        return divergence_mask(advantages, divergence, direction, config.threshold)
    if config.mask == "ratio_clip":
        return ratio_clip_mask(
            advantages,
            support.sampled_log_probs,
            stats.log_prob,
            low=config.clip_low,
            high=config.clip_high,
        )
    mask = resolve_mask(config.mask)(stats, support, advantages)
    if not isinstance(mask, MaskResult):
        raise ValueError(
            f"policy_loss: mask {config.mask!r} must return a MaskResult, got {type(mask).__name__}"
        )
    for name in ("keep", "outside", "outward"):
        tensor = getattr(mask, name)
        if tensor.dtype != torch.bool or tensor.shape != advantages.shape:
            raise ValueError(
                f"policy_loss: mask {config.mask!r}: {name} must be bool of shape "
                f"{tuple(advantages.shape)}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    return mask


def _check_arguments(
    stats: PolicyStatistics,
    support: BehaviorSupport,
    advantages: Tensor,
    config: PolicyLossConfig,
    weights: Tensor | None,
    trained: Tensor | None,
) -> None:
    expected = tuple(stats.log_prob.shape)
    arrived = {
        "the support": support.sampled,
        "advantages": advantages,
        "weights": weights,
        "trained": trained,
    }
    for name, tensor in arrived.items():
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"policy_loss: {name} must be for tokens of shape {expected}, like the "
                f"statistics, got {tuple(tensor.shape)}"
            )
    if trained is not None and trained.dtype != torch.bool:
        raise ValueError(f"policy_loss: trained must be bool, got {trained.dtype}")
    if weights is None and config.aggregation != "token_mean":
        raise ValueError(
            f"policy_loss: aggregation={config.aggregation!r} needs weights, which depend on the "
            "whole global batch; make them with token_weights and pass weights="
        )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"PolicyLossConfig: {name} must be one of {choices}, got {value!r}")


def _require_number(name: str, value: object, *, above: float, below: float = math.inf) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and above < value < below):  # type: ignore[operator]
        limit = "" if below == math.inf else f" and below {below}"
        wanted = f"a finite number above {above}{limit}"
        raise ValueError(f"PolicyLossConfig: {name} must be {wanted}, got {value!r}")
