# SPDX-License-Identifier: Apache-2.0
"""In which precision, and by whose modules, a config trains: what its memory depends on."""

from dataclasses import dataclass
from typing import Literal

from megatron.rl.config import Config

Modules = Literal["local", "transformer_engine"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32_BYTES = 4
# A byte an element, and a float32 scale a row of 128 (activations are quantised by 1 x 128).
FP8_ACTIVATION_BYTES = 1 + FLOAT32_BYTES / 128


@dataclass(frozen=True)
class TrainingPrecision:
    """How the policy is held and computed.

    Attributes:
        modules: "local", Megatron's own on CPU, whose predictions are compared with measurements;
            or "transformer_engine", on GPU.
        weight_bytes: of one weight.
        fp8: linear layers compute in FP8, on GPU.
        fp8_params: they hold their weights in FP8 as well, and in no wider form.
    """

    modules: Modules
    weight_bytes: int
    fp8: bool
    fp8_params: bool = False


def training_precision(config: Config) -> TrainingPrecision:
    """Return what the config asks for. Emulated FP8, on CPU, keeps its tensors in full width."""
    on_gpu = config.run.device != "cpu"
    return TrainingPrecision(
        "transformer_engine" if on_gpu else "local",
        DTYPE_BYTES[config.model.dtype],
        config.model.fp8 != "none" and on_gpu,
        config.model.fp8_params and on_gpu,
    )
