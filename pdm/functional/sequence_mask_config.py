# SPDX-License-Identifier: Apache-2.0
"""Choose a sequence mask by its settings; the masks themselves take tensors and numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from pdm.functional.sequence_acceptance import SequenceMaskResult
from pdm.functional.sequence_masks import ln_trm_mask, sampled_trm_mask, ser_mask, trm_mask

SequenceCriterion = Literal["max", "average", "combined", "ln_trm", "ser"]
SequenceDivergence = Literal["topk_kl", "topk_tv", "full_kl", "full_tv", "sampled"]

_USED_SETTINGS: dict[str, tuple[str, ...]] = {
    "max": ("divergence", "max_threshold"),
    "average": ("divergence", "average_threshold"),
    "combined": ("divergence", "max_threshold", "average_threshold"),
    "ln_trm": ("ratio_threshold", "kl_max"),
    "ser": ("ratio_threshold",),
}
"""What each criterion needs. No setting has a default: the paper recommends none."""

_OPTIONAL_SETTINGS: dict[str, tuple[str, ...]] = {
    "max": ("tv_max_threshold",),
    "average": ("tv_max_threshold",),
    "combined": ("tv_max_threshold",),
    "ln_trm": ("tv_max",),
    "ser": (),
}


@dataclass(frozen=True)
class SequenceMaskConfig:
    """Settings of ``sequence_mask``. A wrong one raises ``ValueError`` that names the setting.

    A setting that the criterion does not read must stay None.
    """

    criterion: SequenceCriterion
    """"max", "average" or "combined" (both) over the tokens' divergences; "ln_trm" or "ser" over
    their ratios."""

    divergence: SequenceDivergence | None = None
    """What max, average and combined look at: KL(behavior || policy) or total variation, on the
    top-K support or in full, or "sampled": k2 for the maximum, k3 for the average."""

    max_threshold: float | None = None
    """max, combined: largest divergence of any token; nats for KL, a probability for TV."""

    average_threshold: float | None = None
    """average, combined: largest mean divergence per token, in the same unit."""

    tv_max_threshold: float | None = None
    """Together with a KL divergence: largest total variation of any token, on top of the rest."""

    ratio_threshold: float | None = None
    """ln_trm: largest W / Z; ser: largest mean of |rho - 1|."""

    kl_max: float | None = None
    """ln_trm: the token KL, in nats, that the weights are made with."""

    tv_max: float | None = None
    """ln_trm: the token TV that the weights are made with; None for Pinsker's inequality alone."""

    def __post_init__(self) -> None:
        _require_choice("criterion", self.criterion, get_args(SequenceCriterion))
        if self.divergence is not None:
            _require_choice("divergence", self.divergence, get_args(SequenceDivergence))
        needed = _USED_SETTINGS[self.criterion]
        allowed = needed + _OPTIONAL_SETTINGS[self.criterion]
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name == "criterion":
                continue
            if value is None and name in needed:
                raise ValueError(
                    f"SequenceMaskConfig: criterion={self.criterion!r} needs {name}, got None"
                )
            if value is not None and name not in allowed:
                raise ValueError(
                    f"SequenceMaskConfig: {name}={value!r} has no effect with "
                    f"criterion={self.criterion!r}; leave it None or change criterion"
                )
            if value is not None and name != "divergence":
                _require_positive(name, value)
        if self.tv_max_threshold is not None and not self.needs_tv:
            raise ValueError(
                "SequenceMaskConfig: tv_max_threshold goes with divergence 'topk_kl' or 'full_kl', "
                f"got divergence={self.divergence!r}; use max_threshold with a TV divergence"
            )

    @property
    def needs_divergence(self) -> bool:
        """Whether ``sequence_mask`` wants ``divergence``, computed as ``self.divergence`` says."""
        return self.divergence not in (None, "sampled")

    @property
    def needs_tv(self) -> bool:
        """Whether ``sequence_mask`` wants ``tv``, on the same support as the KL divergence."""
        return self.tv_max_threshold is not None and self.divergence in ("topk_kl", "full_kl")


def sequence_mask(
    config: SequenceMaskConfig,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    behavior_log_prob: Tensor | None = None,
    policy_log_prob: Tensor | None = None,
    divergence: Tensor | None = None,
    tv: Tensor | None = None,
    trained: Tensor | None = None,
) -> SequenceMaskResult:
    """Apply the configured sequence mask to the tokens of whole sequences.

    Formulas: see ``trm_mask``, ``sampled_trm_mask``, ``ln_trm_mask`` and ``ser_mask``.

    Shapes: ``divergence`` [T] if ``config.needs_divergence``, ``tv`` [T] if ``config.needs_tv``,
    both log-probabilities [T] of the sampled tokens otherwise; what is not needed may be None. The
    rest as in ``trm_mask``. Returns tensors [B].

    Gradient: none.

    Edge cases: those of the masks. An argument that is needed but None raises ``ValueError``.

    Source: trust region masking, section 4.3 and Appendix F.
    """
    if config.needs_divergence:
        chosen = trm_mask(
            _required(config, "divergence", divergence),
            sequence_ids,
            num_sequences,
            max_threshold=config.max_threshold,
            average_threshold=config.average_threshold,
            trained=trained,
        )
        if not config.needs_tv:
            return chosen
        return chosen & trm_mask(
            _required(config, "tv", tv),
            sequence_ids,
            num_sequences,
            max_threshold=config.tv_max_threshold,
            trained=trained,
        )
    behavior = _required(config, "behavior_log_prob", behavior_log_prob)
    policy = _required(config, "policy_log_prob", policy_log_prob)
    if config.criterion in ("ln_trm", "ser"):
        assert config.ratio_threshold is not None
        if config.criterion == "ser":
            return ser_mask(
                behavior,
                policy,
                sequence_ids,
                num_sequences,
                threshold=config.ratio_threshold,
                trained=trained,
            )
        assert config.kl_max is not None
        return ln_trm_mask(
            behavior,
            policy,
            sequence_ids,
            num_sequences,
            threshold=config.ratio_threshold,
            kl_max=config.kl_max,
            tv_max=config.tv_max,
            trained=trained,
        )
    return sampled_trm_mask(
        behavior,
        policy,
        sequence_ids,
        num_sequences,
        max_threshold=config.max_threshold,
        average_threshold=config.average_threshold,
        trained=trained,
    )


def _required(config: SequenceMaskConfig, name: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError(
            f"sequence_mask: criterion={config.criterion!r} with divergence={config.divergence!r} "
            f"needs {name}, got None"
        )
    return tensor


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"SequenceMaskConfig: {name} must be one of {choices}, got {value!r}")


def _require_positive(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0.0):  # type: ignore[arg-type,operator]
        raise ValueError(
            f"SequenceMaskConfig: {name} must be a finite number above 0, got {value!r}"
        )
