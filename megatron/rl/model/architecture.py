# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face ``config.json`` says about a model, checked."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rl.errors import UserError
from megatron.rl.plain_files import read_json_object

# Sizes are 32-bit integers in kernels and file formats.
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True)
class ModelType:
    """What the ``model_type`` of a config.json decides, beyond the numbers beside it."""

    has_experts: bool
    qk_norm: bool


SUPPORTED_MODEL_TYPES = {
    "qwen3": ModelType(has_experts=False, qk_norm=True),
    "qwen3_moe": ModelType(has_experts=True, qk_norm=True),
    "llama": ModelType(has_experts=False, qk_norm=False),
}


@dataclass(frozen=True)
class Architecture:
    """The shape of a Qwen3, Qwen3-MoE or Llama language model.

    Every field has the value of the Hugging Face key named beside it; ``num_experts`` is 0 for a
    dense model, and then the ``moe_*`` fields and ``experts_per_token`` are 0 too.
    """

    model_type: str
    num_layers: int  # num_hidden_layers
    hidden_size: int
    ffn_hidden_size: int  # intermediate_size
    num_heads: int  # num_attention_heads
    num_groups: int  # num_key_value_heads
    head_dim: int
    vocab_size: int
    max_positions: int  # max_position_embeddings
    rope_theta: float
    norm_eps: float  # rms_norm_eps
    tied_embeddings: bool  # tie_word_embeddings
    qk_norm: bool = True  # by model_type: RMSNorm on each head of q and k
    num_experts: int = 0  # num_experts or num_local_experts
    experts_per_token: int = 0  # num_experts_per_tok
    moe_ffn_hidden_size: int = 0  # moe_intermediate_size

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


def read_architecture(model_path: str | Path) -> Architecture:
    """Read and check ``config.json`` in a Hugging Face model folder.

    Raises:
        UserError: no such folder or file, or a model that is not built in exactly the way that
            this project converts; the message names the key.
    """
    config_path = Path(model_path) / "config.json"
    if not os.path.isfile(config_path):  # Path.is_file raises for a name that is too long
        raise UserError(
            f"model.path: expected a Hugging Face model folder with config.json, found none in "
            f"{model_path}"
        )
    return parse_architecture(read_json_object(config_path))


def parse_architecture(config: dict[str, Any]) -> Architecture:
    """Turn the content of a ``config.json`` into an :class:`Architecture`; see there."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"model.path: model_type is {model_type!r}, supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    kind = SUPPORTED_MODEL_TYPES[model_type]
    _refuse_variants(config, kind)
    heads, hidden_size = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    moe: dict[str, int] = {}
    if kind.has_experts:
        moe = {
            "num_experts": _size(config, "num_experts", "num_local_experts"),
            "experts_per_token": _size(config, "num_experts_per_tok"),
            "moe_ffn_hidden_size": _size(config, "moe_intermediate_size"),
        }
    theta = _rope(config).get("rope_theta", config.get("rope_theta", 10000.0))
    return Architecture(
        model_type=model_type,
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=_size(config, "intermediate_size"),
        num_heads=heads,
        num_groups=_size(config, "num_key_value_heads", default=heads),
        head_dim=_size(config, "head_dim", default=hidden_size // heads),
        vocab_size=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings"),
        rope_theta=_positive("rope_theta", theta),
        norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps")),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=kind.qk_norm,
        **moe,
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; earlier releases rope_theta beside rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"model.path: rope_parameters in config.json is {rope!r}")
    return rope


def _size(config: dict[str, Any], *keys: str, default: int | None = None) -> int:
    """Return the first of these keys that is there and not null or 0, as a positive integer."""
    value = next((config[key] for key in keys if config.get(key)), default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
        raise UserError(
            f"model.path: {keys[0]} in config.json is {_short(value)}, expected a positive integer"
        )
    return value


def _positive(key: str, value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise UserError(
            f"model.path: {key} in config.json is {_short(value)}, expected a positive number"
        )
    return float(value)  # type: ignore[arg-type]


def _short(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


def _refuse_variants(config: dict[str, Any], kind: ModelType) -> None:
    """Refuse the options of these model types that this project does not build."""
    rope_type = _rope(config).get("rope_type") or _rope(config).get("type") or "default"
    checks = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
        "rope_type": (rope_type, "default"),
    }
    if kind.has_experts:
        checks["decoder_sparse_step"] = (config.get("decoder_sparse_step", 1), 1)
        checks["mlp_only_layers"] = (config.get("mlp_only_layers") or [], [])
        checks["norm_topk_prob"] = (bool(config.get("norm_topk_prob", False)), True)
    for key, (value, expected) in checks.items():
        if value != expected:
            raise UserError(
                f"model.path: {key} in config.json is {value!r}; only {expected!r} is supported"
            )
