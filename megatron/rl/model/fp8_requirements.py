# SPDX-License-Identifier: Apache-2.0
"""What each FP8 recipe needs of Transformer Engine, the GPU and CUDA; checked before building."""

import importlib.metadata
from dataclasses import dataclass

from packaging.version import Version

from megatron.rl.errors import UserError
from megatron.rl.model.fp8 import FP8Settings, require_same_scales

TRANSFORMER_ENGINE_PACKAGES = ("transformer-engine", "transformer_engine_torch")

# The first release whose recipe Megatron-Core 0.19 takes (fp8_utils.get_fp8_recipe); 1.11 is the
# first with grouped FP8 products for experts (transformer_config.py:2302).
FIRST_RELEASE = {"delayed": "1.11", "tensorwise": "2.2", "mxfp8": "2.1", "blockwise": "2.3"}
# Compute capabilities [from, below), as Transformer Engine checks them itself, later.
CAPABILITIES = {
    "delayed": ((8, 9), None),
    "tensorwise": ((8, 9), None),
    "blockwise": ((9, 0), None),
    "mxfp8": ((10, 0), (12, 0)),
}
GPU_NAMES = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}
BLOCKWISE_CUDA = (12, 9)
BLACKWELL = (10, 0)


@dataclass(frozen=True)
class Platform:
    """What is installed and plugged in; None where there is none."""

    transformer_engine: str | None
    capability: tuple[int, int] | None
    cuda: tuple[int, int] | None


def this_platform() -> Platform:
    """Look at this machine."""
    import torch

    cuda = torch.version.cuda
    return Platform(
        transformer_engine=_transformer_engine_version(),
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        cuda=None if cuda is None else Version(cuda).release[:2],  # type: ignore[arg-type]
    )


def require_fp8_support(settings: FP8Settings, platform: Platform) -> None:
    """Raise UserError, saying what is missing, where this recipe cannot run."""
    recipe = settings.recipe
    if recipe == "none":
        return
    first = FIRST_RELEASE[recipe]
    found = platform.transformer_engine
    if found is None or Version(found).release < Version(first).release:
        raise UserError(
            f"model.fp8 {recipe}: expected Transformer Engine {first} or newer, found "
            f"{found or 'none'}. Use an image that has it (NVIDIA's PyTorch images do), or set "
            "model.fp8 to none"
        )
    _require_capability(recipe, platform.capability)
    if recipe == "blockwise" and (platform.cuda or (0, 0)) < BLOCKWISE_CUDA:
        raise UserError(
            f"model.fp8 blockwise: expected CUDA {_dotted(BLOCKWISE_CUDA)} or newer, found "
            f"{'none' if platform.cuda is None else _dotted(platform.cuda)}"
        )
    on_blackwell = platform.capability is not None and platform.capability >= BLACKWELL
    if recipe == "blockwise" and on_blackwell and settings.scales == "float32":
        raise UserError(
            "bridge.scales float32 with model.fp8 blockwise: Transformer Engine has only powers of "
            "two on Blackwell, where it emulates the recipe by MXFP8; set bridge.scales to "
            "power_of_two"
        )


def require_transformer_engine(settings: FP8Settings) -> None:
    """Check this machine, and that Transformer Engine has the bridge's scales, before a GPU run."""
    require_fp8_support(settings, this_platform())
    if settings.recipe == "blockwise":
        from transformer_engine.common.recipe import (  # type: ignore[import-not-found]
            Float8BlockScaling,
        )

        require_same_scales(settings, Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale)


def _require_capability(recipe: str, found: tuple[int, int] | None) -> None:
    lowest, below = CAPABILITIES[recipe]
    if found is None or found < lowest or (below is not None and found >= below):
        limit = "or newer" if below is None else f"up to, not including, {_dotted(below)}"
        raise UserError(
            f"model.fp8 {recipe}: expected a GPU of compute capability {_dotted(lowest)} "
            f"({GPU_NAMES[lowest]}) {limit}, found {'none' if found is None else _dotted(found)}"
        )


def _transformer_engine_version() -> str | None:
    for package in TRANSFORMER_ENGINE_PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
