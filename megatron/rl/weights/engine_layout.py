# SPDX-License-Identifier: Apache-2.0
"""How a rollout engine shards the weights: whether they fit, and how many bytes it gets."""

from dataclasses import dataclass
from typing import Literal

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.weights.block_fp8 import BLOCK, is_quantized, scale_shape
from megatron.rl.weights.joins import whole
from megatron.rl.weights.names import Shape

Quantization = Literal["none", "block_fp8"]

BF16_BYTES, FP8_BYTES, SCALE_BYTES = 2, 1, 4


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of one tensor as an engine gets it; ``scales`` are a tensor of their own."""

    data: int
    scales: int = 0

    @property
    def total(self) -> int:
        return self.data + self.scales


def engine_bytes(name: str, shape: Shape, quantization: Quantization) -> TensorBytes:
    """Return the bytes of a Hugging Face tensor in BF16, or in block FP8 where that applies."""
    numel = whole(shape).numel
    if quantization == "none" or not is_quantized(name):
        return TensorBytes(BF16_BYTES * numel)
    return TensorBytes(FP8_BYTES * numel, SCALE_BYTES * whole(scale_shape(shape)).numel)


def check_engine_layout(
    model: Architecture,
    tensor_parallel: int,
    quantization: Quantization,
    *,
    expert_parallel: bool = False,
) -> None:
    """Check that an engine can shard the model over so many GPUs.

    vLLM gives every GPU whole heads, repeats key-value heads when there are fewer of them than
    GPUs, and divides FFN columns, or whole experts under ``expert_parallel``. With block FP8 each
    part has to be a whole number of blocks of 128, since a scale cannot be shared.

    Raises:
        UserError: it cannot; says which sizes are possible.
    """
    problem = _problem(model, tensor_parallel, quantization, expert_parallel)
    if problem is None:
        return
    sizes = range(1, model.num_heads + 1)
    fits = [n for n in sizes if _problem(model, n, quantization, expert_parallel) is None]
    advice = f"possible sizes are {', '.join(map(str, fits))}" if fits else "no size fits"
    if model.is_moe and not expert_parallel:
        fits = [n for n in sizes if _problem(model, n, quantization, True) is None]
        advice += (
            f", or with enable_expert_parallel, which keeps experts whole: "
            f"{', '.join(map(str, fits)) or 'none'}"
        )
    raise UserError(f"the engine's tensor_parallel is {tensor_parallel}: {problem}; {advice}")


def _problem(
    model: Architecture, tensor_parallel: int, quantization: Quantization, expert_parallel: bool
) -> str | None:
    """Say why the model cannot be sharded so, or None."""
    if tensor_parallel < 1:
        return "expected at least 1"
    counts = {"attention heads": model.num_heads}
    if model.num_groups >= tensor_parallel:
        counts["key-value heads"] = model.num_groups
    elif tensor_parallel % model.num_groups:
        return f"it is no multiple of the model's {model.num_groups} key-value heads"
    if model.is_moe and expert_parallel:
        counts["experts"] = model.num_experts
        ffn = model.moe_ffn_hidden_size
    else:
        ffn = model.moe_ffn_hidden_size if model.is_moe else model.ffn_hidden_size
        counts["FFN columns"] = ffn
        ffn //= tensor_parallel
    for what, count in counts.items():
        if count % tensor_parallel:
            return f"it does not divide the model's {count} {what}"
    if quantization == "none":
        return None
    parts = {
        "query rows": model.num_heads // tensor_parallel * model.head_dim,
        "key-value rows": max(1, model.num_groups // tensor_parallel) * model.head_dim,
        "FFN columns": ffn,
    }
    for what, size in parts.items():
        if size % BLOCK:
            return f"a GPU would have {size} {what}, which is no multiple of the FP8 block {BLOCK}"
    return None
