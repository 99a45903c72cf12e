# SPDX-License-Identifier: Apache-2.0
"""What the forward pass of one transformer layer keeps for its backward pass, tensor by tensor.

Two tables, since two sets of modules are in use. That of the local modules (CPU) was read off the
allocations of a real step and is compared with them in ``benchmarks/plan_memory.py``. That of
Transformer Engine is an expectation, neither measured nor read from its code: what the backward
formulas of each module need (a norm fused with the product behind it, flash attention, grouped
products, fused SwiGLU), in the precision that its products read. Which modules there are, and which
of them recomputation drops, is Megatron-Core's (``gpt_layer_specs``, ``transformer_layer``).

Letters: H hidden, A query columns (heads x head size), G key columns, F FFN columns, k experts a
token.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.planning.precision import FP8_ACTIVATION_BYTES, TrainingPrecision

Spread = Literal["sequence", "tensor", "expert", "every"]


@dataclass(frozen=True)
class Saved:
    """One kept tensor.

    Attributes:
        name: what it is.
        elements: a token, over all tensor-parallel ranks; under "expert" a token's copy at one
            expert.
        spread: "sequence" is divided by TP under sequence parallelism, "tensor" by TP always,
            "expert" has k copies of a token, spread like a sequence; "every" rank has all of it.
        bytes: an element.
        modules: names in Megatron's ``recompute_modules`` each of which drops it.
    """

    name: str
    elements: int
    spread: Spread
    bytes: float
    modules: tuple[str, ...] = ()


def saved_tensors(model: Architecture, precision: TrainingPrecision) -> list[Saved]:
    """Return what one layer keeps a token."""
    if precision.modules == "local":
        return _local_attention(model, precision.weight_bytes) + (
            _local_experts(model, precision.weight_bytes)
            if model.is_moe
            else _local_mlp(model, precision.weight_bytes)
        )
    return _engine_attention(model, precision) + (
        _engine_experts(model, precision) if model.is_moe else _engine_mlp(model, precision)
    )


def token_bytes(
    saved: list[Saved], model: Architecture, layout: ParallelConfig, imbalance: float
) -> float:
    """Sum the bytes of a token on one rank, per token of its context-parallel part.

    Args:
        imbalance: how many token copies the busiest expert-parallel rank gets, relative to the
            mean.
    """
    sequence = layout.tensor if layout.sequence_parallel else 1
    busiest = imbalance if layout.expert > 1 else 1.0
    divisor = {
        "sequence": sequence,
        "tensor": layout.tensor,
        "every": 1,
        "expert": sequence / (max(model.experts_per_token, 1) * busiest),
    }
    return sum(item.elements * item.bytes / divisor[item.spread] for item in saved)


def _columns(model: Architecture) -> tuple[int, int]:
    return model.num_heads * model.head_dim, model.num_groups * model.head_dim


def _local_attention(model: Architecture, width: int) -> list[Saved]:
    hidden, (q, kv) = model.hidden_size, _columns(model)
    saved = [
        Saved("residuals", 2 * hidden, "sequence", width),
        Saved("norms: normalised and scaled", 4 * hidden, "sequence", width, ("layernorm",)),
        Saved("q, k, v", q + 2 * kv, "tensor", width),
        Saved("q, k after rotation", q + kv, "tensor", width),
        # A head's cosines and sines are multiplied out for q and for k, on every rank.
        Saved("rotary factors", 4 * model.head_dim, "every", width),
        Saved("q, k, v in a padded batch", q + 2 * kv, "tensor", width, ("core_attn",)),
        Saved("attention output, padded", q, "tensor", width, ("core_attn",)),
        Saved("attention output", q, "tensor", width),
    ]
    if model.qk_norm:
        saved.append(Saved("q copied, q and k normalised", 2 * q + kv, "tensor", width))
    return saved


def _local_mlp(model: Architecture, width: int) -> list[Saved]:
    ffn = model.ffn_hidden_size
    return [
        Saved("gate and up", 2 * ffn, "tensor", width, ("mlp",)),
        Saved("SwiGLU: silu, offset, product", 3 * ffn, "tensor", width, ("mlp",)),
    ]


def _local_experts(model: Architecture, width: int) -> list[Saved]:
    ffn, copies = model.moe_ffn_hidden_size, model.experts_per_token
    return [
        # Top-k, softmax, sort orders and the routing map.
        Saved("router", 9 * copies + 2 * model.num_experts, "sequence", 4, ("moe",)),
        Saved("tokens by expert", model.hidden_size, "expert", width, ("moe",)),
        Saved("gate and up", 2 * ffn, "expert", width, ("moe",)),
        Saved("SwiGLU: silu, offset, product", 3 * ffn, "expert", width, ("moe",)),
        Saved("product times probability", ffn, "expert", width, ("moe",)),
    ]


def _engine_attention(model: Architecture, precision: TrainingPrecision) -> list[Saved]:
    hidden, (q, kv) = model.hidden_size, _columns(model)
    width = precision.weight_bytes
    into = FP8_ACTIVATION_BYTES if precision.fp8 else width
    # Norms are parts of the products behind them, which "layernorm" does not reach. In front of
    # experts a norm is a module of its own, whose output the router keeps as it is.
    if model.is_moe:
        second = Saved("second norm", hidden, "sequence", width, ("layernorm",))
    else:
        second = Saved("second norm", hidden, "sequence", into, ("mlp",))
    saved = [
        Saved("residuals", 2 * hidden, "sequence", width),
        Saved("first norm", hidden, "sequence", into),
        second,
        Saved("q, k, v", q + 2 * kv, "tensor", width),
        Saved("q, k after rotation", q + kv, "tensor", width),
        Saved("attention output", q, "tensor", width),
    ]
    if precision.fp8:
        saved.append(Saved("attention output in FP8", q, "tensor", into))
    return saved


def _engine_mlp(model: Architecture, precision: TrainingPrecision) -> list[Saved]:
    ffn, width = model.ffn_hidden_size, precision.weight_bytes
    into = FP8_ACTIVATION_BYTES if precision.fp8 else width
    return [
        Saved("gate and up", 2 * ffn, "tensor", width, ("mlp",)),
        Saved("SwiGLU", ffn, "tensor", into, ("mlp",)),
    ]


def _engine_experts(model: Architecture, precision: TrainingPrecision) -> list[Saved]:
    ffn, copies, width = model.moe_ffn_hidden_size, model.experts_per_token, precision.weight_bytes
    into = FP8_ACTIVATION_BYTES if precision.fp8 else width
    return [
        Saved("router", 9 * copies + 3 * model.num_experts, "sequence", 4, ("moe",)),
        Saved("tokens by expert", model.hidden_size, "expert", into, ("moe",)),
        Saved("gate and up", 2 * ffn, "expert", width, ("moe",)),
        Saved("SwiGLU", ffn, "expert", into, ("moe", "moe_act")),
    ]
