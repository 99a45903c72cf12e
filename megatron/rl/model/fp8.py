# SPDX-License-Identifier: Apache-2.0
"""FP8 in training: a run's settings, and the fields of Megatron's config that they stand for.

Linear layers of attention, of the MLP and of the experts multiply in FP8; router, head, embedding,
norms and the attention itself stay in ``model.dtype``. So do the parameters, unless
``model.fp8_params`` is set: optimizer, checkpoints and weight bridge see what they see without FP8.

On a GPU Transformer Engine multiplies; on CPU ``blockwise`` is emulated (``fp8_emulation.py``).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron.rl.errors import UserError

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.rl.config import Config
    from megatron.rl.parallel import ParallelConfig

FP8Recipe = Literal["none", "blockwise", "delayed", "tensorwise", "mxfp8"]
FP8Format = Literal["e4m3", "hybrid"]

# Transformer Engine reads it once, when it is imported.
SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"

# Set from the model section; a user's value under megatron.transformer would contradict it.
_OWN_FIELDS: Mapping[str, str] = {
    "fp8": "model.fp8 and model.fp8_format",
    "fp8_recipe": "model.fp8",
    "fp8_param": "model.fp8_params",
    "first_last_layers_bf16": "model.fp8_skip_first and model.fp8_skip_last",
    "num_layers_at_start_in_bf16": "model.fp8_skip_first",
    "num_layers_at_end_in_bf16": "model.fp8_skip_last",
}
# The recipes with which Megatron reads a field (fp8_utils.get_fp8_recipe); all read the rest.
_WITH_ATTENTION = ("delayed", "tensorwise", "mxfp8")
_READ_BY: Mapping[str, tuple[str, ...]] = {
    "fp8_margin": ("delayed",),
    "fp8_amax_history_len": ("delayed",),
    "fp8_amax_compute_algo": ("delayed",),
    "fp8_wgrad": ("delayed",),
    "tp_only_amax_red": ("delayed",),
    "fp8_dot_product_attention": _WITH_ATTENTION,
    "fp8_multi_head_attention": _WITH_ATTENTION,
    "fp8_output_proj": (),  # the loss takes the head's weight as it is
    "fp8_quantizer_factory": (),  # of the recipe "custom", which model.fp8 does not have
    "fp8_interval": (),  # deprecated
}

# FP8 matrix products want so many tokens at a time (Megatron's fp8_utils.get_fp8_align_size). Under
# sequence parallelism a rank's part of 128 lets Transformer Engine gather blocks in FP8; else it
# gathers in BF16 and warns.
_TOKEN_MULTIPLE = {"blockwise": 128, "mxfp8": 32, "delayed": 16, "tensorwise": 16}


@dataclass(frozen=True)
class FP8Settings:
    """How linear layers multiply in training; ``recipe`` "none" is without FP8.

    Attributes:
        recipe: how scales are chosen; Megatron's ``fp8_recipe``.
        format: e4m3 everywhere, or hybrid: e5m2 for gradients.
        params: keep the parameters themselves in FP8 and gather them so.
        skip_first, skip_last: layers at the model's ends that multiply in ``model.dtype``.
        scales: of blocks, as the weight bridge's.
    """

    recipe: FP8Recipe = "none"
    format: FP8Format = "e4m3"
    params: bool = False
    skip_first: int = 0
    skip_last: int = 0
    scales: Literal["power_of_two", "float32"] = "power_of_two"

    @property
    def enabled(self) -> bool:
        return self.recipe != "none"

    def quantizes_layer(self, layer: int, num_layers: int) -> bool:
        """Say whether layer number ``layer``, from 0, of the whole model multiplies in FP8."""
        return self.enabled and self.skip_first <= layer < num_layers - self.skip_last


def fp8_settings(config: "Config") -> FP8Settings:
    """Return the settings of a run. Trainer and bridge have the same scales by construction."""
    model = config.model
    return FP8Settings(
        recipe=model.fp8,
        format=model.fp8_format,
        params=model.fp8_params,
        skip_first=model.fp8_skip_first,
        skip_last=model.fp8_skip_last,
        scales=config.bridge.scales,
    )


def transformer_fields(settings: FP8Settings, *, is_moe: bool) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig; none without FP8."""
    if not settings.enabled:
        return {}
    fields: dict[str, Any] = {
        "fp8": settings.format,
        "fp8_recipe": settings.recipe,
        "fp8_param": settings.params,
    }
    if settings.skip_first or settings.skip_last:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": settings.skip_first,
            "num_layers_at_end_in_bf16": settings.skip_last,
        }
    if is_moe:
        # Experts get whole multiples of tokens from the router, and nothing is padded behind it.
        fields["moe_router_padding_for_quantization"] = True
    return fields


def check_transformer_options(
    options: Mapping[str, Any], settings: FP8Settings, *, emulated: bool
) -> None:
    """Refuse fields under ``megatron.transformer`` that contradict the settings or do nothing.

    Args:
        options: what the user wrote there.
        emulated: on CPU, where Megatron knows nothing of FP8.
    """
    for name in options:
        where = f"megatron.transformer.{name}"
        if name in _OWN_FIELDS:
            raise UserError(f"{where} is set from {_OWN_FIELDS[name]}; remove it")
        if not (name.startswith(("fp8_", "moe_router_padding_for_")) or name in _READ_BY):
            continue
        if not settings.enabled:
            raise UserError(f"{where} has no effect while model.fp8 is none; remove it")
        if emulated:
            raise UserError(f"{where} has no effect on CPU, where FP8 is emulated; remove it")
        if settings.recipe not in _READ_BY.get(name, (settings.recipe,)):
            raise UserError(f"{where} has no effect with model.fp8 {settings.recipe}; remove it")


def distributed_fields(settings: FP8Settings) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig; none unless parameters are in FP8."""
    return {"fp8_param_gather": True} if settings.params else {}


def input_multiple(layout: "ParallelConfig", config: "TransformerConfig") -> int:
    """Return what the tokens of a micro-batch have to be a multiple of.

    Sequence parallelism cuts them into equal parts; matrix products in FP8 want each part to be a
    multiple of their own. (Emulated ones do not.)
    """
    ways = layout.tensor if layout.sequence_parallel else 1
    if not config.fp8:
        return ways
    # "custom", which Megatron's own command line has, may be any of them.
    return ways * _TOKEN_MULTIPLE.get(config.fp8_recipe or "", max(_TOKEN_MULTIPLE.values()))


def scales_environment(settings: FP8Settings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Transformer Engine choose block scales as the bridge does.

    They must be in the environment before it is imported; :func:`require_same_scales` looks at
    what came of it.

    Raises:
        UserError: the variable is set already, to the other kind.
    """
    if settings.recipe != "blockwise":
        return {}
    value = "1" if settings.scales == "float32" else "0"
    found = inherited.get(SCALES_VARIABLE, value)
    if (found == "1") != (value == "1"):
        raise UserError(
            f"{SCALES_VARIABLE} is {found} in the environment, but bridge.scales is "
            f"{settings.scales}: trainer and engine would round weights differently. Unset it, or "
            "change bridge.scales"
        )
    return {SCALES_VARIABLE: value}


def set_scales_environment(settings: FP8Settings) -> None:
    """Set :func:`scales_environment` in this process."""
    os.environ.update(scales_environment(settings, os.environ))


def require_same_scales(settings: FP8Settings, transformer_engine_uses: object) -> None:
    """Compare the scales that Transformer Engine will use with the bridge's.

    Args:
        transformer_engine_uses: ``power_2_scale`` of its recipe for weights.

    Raises:
        UserError: it was imported before the variable was set, or has other defaults.
    """
    if bool(transformer_engine_uses) != (settings.scales == "power_of_two"):
        raise UserError(
            f"bridge.scales is {settings.scales}, but Transformer Engine was imported with "
            f"{'power-of-two' if transformer_engine_uses else 'float32'} scales: set "
            f"{SCALES_VARIABLE}={1 if settings.scales == 'float32' else 0} in the environment of "
            "every rank"
        )
