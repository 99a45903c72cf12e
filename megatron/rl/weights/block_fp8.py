# SPDX-License-Identifier: Apache-2.0
"""Block FP8: the one quantiser, for weights that go to the engine and for the trainer's emulation.

A block of values shares one float32 scale: 128 x 128 values of a weight, or 128 neighbours in a row
of an activation. The values are stored as e4m3 (four exponent bits, three mantissa bits, largest
448), and

    value = data * scale_inv

``scale_inv`` follows from the largest magnitude ``amax`` of the block, in one of two ways:

- ``power_of_two``: the smallest power of two that is not below ``amax / 448``. This is what
  Transformer Engine computes unless told otherwise. Scaling is then exact, so the only error is
  the rounding to e4m3, and bfloat16 holds every dequantised value.
- ``float32``: ``amax / 448``, so the largest value of every block lands on 448.

Conventions that both sides must share, and so live only here:

- ``amax`` is raised to ``amax_floor`` first, which gives zero and tiny blocks a finite scale; zeros
  stay zeros. Transformer Engine has no floor, so ours is as low as float32 allows. With
  power-of-two scales the two agree bit for bit on every block whose amax is at least the floor, and
  in values on zero blocks, to which it gives the scale 1. (Its float32 scales are 1 / (448 / amax),
  which may differ in the last bit.)
- Values are divided by ``scale_inv`` in float32 and rounded to the nearest e4m3, ties to even. A
  bfloat16 tensor and its float32 copy give the same bytes.
- Blocks at the right and lower edge may be smaller; they have scales like any other.

Quantising what was dequantised (in float32) returns the same values and the same bytes, with one
exception: a power-of-two block whose amax rounded down to 224 comes back with half the scale and
doubled data.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.rl.errors import UserError

BLOCK = 128
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
QUANTIZED_DTYPE = torch.float8_e4m3fn

# Below this, one over the scale would leave the range of normal float32 numbers.
SMALLEST_FLOOR = 1e-30

# A weight is worked through in stripes of this many rows. On CPU the float32 copy of a stripe stays
# in the cache between the steps; on a GPU few kernels are started and the copy is still small.
CPU_STRIPE_ROWS = BLOCK
GPU_STRIPE_ROWS = 64 * BLOCK

# What lies between powers of two in the bits of a float32. The largest e4m3 is 1.75 * 2**8, the
# largest e5m2 1.75 * 2**15, hence the two.
_MANTISSA_BITS = 23
_MANTISSA_ABOVE_1_75 = (1 << _MANTISSA_BITS) - 1 - (0b11 << (_MANTISSA_BITS - 2))
_LARGEST = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_EXPONENT_OF_LARGEST = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}

_QUANTIZED_NAME = re.compile(r"\.(?:[qkvo]|gate|up|down)_proj\.weight\Z")


class NonFiniteWeights(UserError):
    """Weights with infinities or NaNs, which have no FP8 form."""


@dataclass(frozen=True)
class BlockFP8:
    """How scales are chosen. Trainer and bridge of a run share one instance."""

    scales: Literal["float32", "power_of_two"] = "power_of_two"
    """``power_of_two``: amax / 448 rounded up to a power of two; ``float32``: amax / 448 itself."""

    amax_floor: float = SMALLEST_FLOOR
    """The smallest amax that a scale is computed from."""

    def __post_init__(self) -> None:
        if self.scales not in ("float32", "power_of_two"):
            raise UserError(
                f"block FP8 scales: expected 'power_of_two' or 'float32', got {self.scales!r}"
            )
        if not SMALLEST_FLOOR <= self.amax_floor < float("inf"):
            raise UserError(
                f"block FP8 amax floor: expected a number >= {SMALLEST_FLOOR}, "
                f"got {self.amax_floor}"
            )


@dataclass(frozen=True)
class QuantizedWeight:
    """``data`` [..., N, K] e4m3; ``scale_inv`` [..., ceil(N/128), ceil(K/128)] float32."""

    data: Tensor
    scale_inv: Tensor


@dataclass(frozen=True)
class QuantizedActivation:
    """``data`` [..., K] e4m3; ``scale_inv`` [..., ceil(K/128)] float32."""

    data: Tensor
    scale_inv: Tensor


def is_quantized(hf_name: str) -> bool:
    """Say whether a Hugging Face tensor is stored in FP8: projections and experts are.

    The head, the embedding, norms, biases and the router stay in the checkpoint's own precision.
    """
    return _QUANTIZED_NAME.search(hf_name) is not None


def scale_shape(weight_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of ``scale_inv`` for a weight of shape [..., N, K]."""
    *batch, rows, columns = weight_shape
    return (*batch, -(-rows // BLOCK), -(-columns // BLOCK))


def allocate_quantized(
    weight_shape: Sequence[int], device: torch.device | str = "cpu"
) -> QuantizedWeight:
    """Return uninitialised memory for the quantised form of a weight of this shape."""
    return QuantizedWeight(
        torch.empty(tuple(weight_shape), dtype=QUANTIZED_DTYPE, device=device),
        torch.empty(scale_shape(weight_shape), dtype=torch.float32, device=device),
    )


def quantize_weight(
    weight: Tensor, fmt: BlockFP8, out: QuantizedWeight | None = None, *, name: str = "weight"
) -> QuantizedWeight:
    """Quantise a weight in blocks of 128 x 128.

    Args:
        weight: [N, K], or [E, N, K] for a stack of experts; float32 or bfloat16. No gradient.
        fmt: how scales are chosen.
        out: memory to write into, contiguous; made when missing.
        name: what an error calls the tensor.

    Returns:
        ``out``, or what was made.

    Raises:
        NonFiniteWeights: an element is infinite or NaN; what ``out`` then holds is undefined.
        ValueError: a dtype or shape that does not fit.
    """
    if weight.dim() not in (2, 3) or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{name}: expected [N, K] or [E, N, K] in float32 or bfloat16, got "
            f"{list(weight.shape)} in {weight.dtype}"
        )
    weight = weight.detach()
    out = allocate_quantized(weight.shape, weight.device) if out is None else out
    _check_out(weight, out, name)
    amax = torch.empty_like(out.scale_inv)
    if weight.dim() == 3 and weight.size(1) % BLOCK == 0 and weight.is_contiguous():
        # No block straddles two experts, so the stack is one tall matrix.
        flat = QuantizedWeight(out.data.flatten(0, 1), out.scale_inv.flatten(0, 1))
        _quantize_matrix(weight.flatten(0, 1), fmt, flat, amax.flatten(0, 1))
    elif weight.dim() == 3:
        for expert, matrix in enumerate(weight):
            part = QuantizedWeight(out.data[expert], out.scale_inv[expert])
            _quantize_matrix(matrix, fmt, part, amax[expert])
    else:
        _quantize_matrix(weight, fmt, out, amax)
    if not bool(amax.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise NonFiniteWeights(
            f"{name}: expected finite weights, got {bad:,} of {weight.numel():,} infinite or NaN; "
            "they cannot be quantised to FP8"
        )
    return out


def dequantize_weight(
    data: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``data * scale_inv``, computed in float32 and rounded once to ``dtype``.

    Args:
        data: [..., N, K] e4m3.
        scale_inv: [..., ceil(N/128), ceil(K/128)] float32.
    """
    if tuple(scale_inv.shape) != scale_shape(data.shape):
        raise ValueError(
            f"expected scales of shape {list(scale_shape(data.shape))} for a weight of shape "
            f"{list(data.shape)}, got {list(scale_inv.shape)}"
        )
    rows, columns = data.shape[-2:]
    wide = scale_inv.to(torch.float32).repeat_interleave(BLOCK, dim=-1)[..., :columns]
    return (
        data.to(torch.float32).mul_(wide.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]).to(dtype)
    )


def quantize_activation(
    x: Tensor, fmt: BlockFP8, dtype: torch.dtype = QUANTIZED_DTYPE
) -> QuantizedActivation:
    """Quantise an activation, or a gradient of one, in blocks of 128 along its last dimension.

    A block with a NaN or an infinity in it comes back as NaN.

    Args:
        x: [..., K] float32 or bfloat16. No gradient.
        fmt: how scales are chosen.
        dtype: e4m3, or e5m2 for gradients in Transformer Engine's hybrid format.
    """
    columns = x.size(-1)
    blocks = F.pad(x.detach().float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale_inv = _scale_inv(blocks.abs().amax(-1), fmt, dtype)
    _apply_factor(blocks, _factor(scale_inv, fmt).unsqueeze(-1), fmt, dtype)  # pad made a copy
    data = blocks.to(dtype).flatten(-2)[..., :columns].contiguous()
    return QuantizedActivation(data, scale_inv)


def dequantize_activation(
    data: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``data * scale_inv`` for an activation; computed in float32, rounded once.

    Args:
        data: [..., K] e4m3.
        scale_inv: [..., ceil(K/128)] float32.
    """
    wide = scale_inv.repeat_interleave(BLOCK, dim=-1)[..., : data.size(-1)]
    return data.to(torch.float32).mul_(wide).to(dtype)


def quantization_config(fmt: BlockFP8, modules_to_not_convert: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of config.json that vLLM and transformers read.

    The same for both kinds of scales: they are stored as float32 either way.

    Args:
        fmt: the format of the weights.
        modules_to_not_convert: names of the linear modules that are not quantised, in full, since
            vLLM compares whole names.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(modules_to_not_convert),
    }


def _check_out(weight: Tensor, out: QuantizedWeight, name: str) -> None:
    expected = (tuple(weight.shape), scale_shape(weight.shape))
    got = (tuple(out.data.shape), tuple(out.scale_inv.shape))
    dtypes = (out.data.dtype, out.scale_inv.dtype)
    if got != expected or dtypes != (QUANTIZED_DTYPE, torch.float32):
        raise ValueError(
            f"{name}: expected memory for e4m3 data {list(expected[0])} and float32 scales "
            f"{list(expected[1])}, got {dtypes[0]} {list(got[0])} and {dtypes[1]} {list(got[1])}"
        )
    if not (out.data.is_contiguous() and out.scale_inv.is_contiguous()):
        raise ValueError(f"{name}: expected contiguous memory for the quantised weight")


def _quantize_matrix(weight: Tensor, fmt: BlockFP8, out: QuantizedWeight, amax: Tensor) -> None:
    """Quantise one matrix [N, K] into ``out``; leave the amax of its blocks in ``amax``.

    Views are made by ``split``, once: small tensor operations would cost as much as the arithmetic.
    """
    rows, columns = weight.shape
    heights = _stripe_heights(rows, weight.device)
    block_heights = [-(-height // BLOCK) for height in heights]
    amax.copy_(_block_amax(weight, heights))
    out.scale_inv.copy_(_scale_inv(amax, fmt))
    factor = _factor(out.scale_inv, fmt).repeat_interleave(BLOCK, dim=1)[:, None, :columns]
    scratch = torch.empty(max(heights), columns, dtype=torch.float32, device=weight.device)
    for stripe, stripe_factor, data in zip(
        weight.split(heights), factor.split(block_heights), out.data.split(heights), strict=True
    ):
        scaled = scratch[: stripe.size(0)].copy_(stripe)
        _apply_factor(_block_rows(scaled), stripe_factor, fmt)
        data.copy_(scaled)


def _stripe_heights(rows: int, device: torch.device) -> list[int]:
    """Cut rows into stripes of whole blocks, and what remains below them."""
    height = CPU_STRIPE_ROWS if device.type == "cpu" else GPU_STRIPE_ROWS
    whole, rest = divmod(rows, BLOCK)
    heights = [min(height, whole * BLOCK - top) for top in range(0, whole * BLOCK, height)]
    return heights + [rest] * (rest > 0)


def _block_rows(stripe: Tensor) -> Tensor:
    """View a stripe [rows, columns] as [rows of blocks, rows in a block, columns]."""
    return stripe.unflatten(0, (-1, min(stripe.size(0), BLOCK)))


def _block_amax(weight: Tensor, heights: list[int]) -> Tensor:
    """Return the largest magnitude of each block; float32, not finite if any element is not.

    Magnitudes of floating-point numbers are ordered as their bits are, and integers are compared
    much faster; NaN has larger bits than any number, so it is never lost in the comparison.
    """
    bits = weight.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32)
    no_sign = torch.iinfo(bits.dtype).max
    by_column = torch.cat([_block_rows(stripe & no_sign).amax(1) for stripe in bits.split(heights)])
    by_column = F.pad(by_column, (0, -by_column.size(1) % BLOCK))
    return by_column.unflatten(1, (-1, BLOCK)).amax(2).view(weight.dtype).float()


def _scale_inv(amax: Tensor, fmt: BlockFP8, dtype: torch.dtype = QUANTIZED_DTYPE) -> Tensor:
    """Return the scale of each block, from its largest magnitude (both float32).

    NaN where the largest magnitude is not finite, so that the whole block becomes NaN: casts to
    e4m3 disagree about infinities.
    """
    finite = amax.isfinite()
    amax = amax.clamp_min(fmt.amax_floor)
    if fmt.scales == "float32":
        # By a tensor: division by a Python number becomes a multiplication on some devices.
        scale_inv = amax / torch.full_like(amax, _LARGEST[dtype])
    else:
        # Round the exponent up when the mantissa is above 1.75, then clear the mantissa.
        exponent = (amax.view(torch.int32) + _MANTISSA_ABOVE_1_75) >> _MANTISSA_BITS
        scale_inv = ((exponent - _EXPONENT_OF_LARGEST[dtype]) << _MANTISSA_BITS).view(torch.float32)
    return scale_inv.masked_fill(~finite, math.nan)


def _factor(scale_inv: Tensor, fmt: BlockFP8) -> Tensor:
    """Return what :func:`_apply_factor` needs of the scales."""
    return scale_inv.reciprocal() if fmt.scales == "power_of_two" else scale_inv


def _apply_factor(
    values: Tensor, factor: Tensor, fmt: BlockFP8, dtype: torch.dtype = QUANTIZED_DTYPE
) -> None:
    """Divide by the scale, in place, and stay within what the FP8 type can hold."""
    if fmt.scales == "power_of_two":
        values.mul_(factor)  # by the reciprocal: exact, and faster than a division
    else:
        # amax / (amax / 448) may be a little more than 448, which some casts turn into NaN.
        values.div_(factor).clamp_(-_LARGEST[dtype], _LARGEST[dtype])
