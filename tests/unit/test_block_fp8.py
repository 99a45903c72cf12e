# SPDX-License-Identifier: Apache-2.0
"""The block FP8 quantiser against float64 and hand-worked values."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron.rl.errors import UserError
from megatron.rl.weights import block_fp8
from megatron.rl.weights.block_fp8 import (
    BLOCK,
    BlockFP8,
    NonFiniteWeights,
    QuantizedWeight,
    allocate_quantized,
    dequantize_activation,
    dequantize_weight,
    is_quantized,
    quantization_config,
    quantize_activation,
    quantize_weight,
)
from tests.checkpoints import QWEN3, QWEN3_MOE, tensor_shapes

FORMATS = (BlockFP8("power_of_two"), BlockFP8("float32"))
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.scales)

# Ragged in rows, in columns, in both, smaller than a block, and stacks.
SHAPES = ((256, 384), (300, 128), (128, 200), (5, 7), (129, 1090), (3, 192, 130))


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values over ten decades, so that blocks hold normal and subnormal e4m3 and zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.empty(shape).uniform_(-8, 2, generator=generator)
    return torch.randn(shape, generator=generator) * sizes


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of every element, in float64."""
    index = [torch.arange(size) // BLOCK for size in shape[-2:]]
    return scales.double()[..., index[0], :][..., index[1]]


def half_step(scaled: torch.Tensor) -> torch.Tensor:
    """Half the distance of neighbouring e4m3 numbers around a float64 value within +-448."""
    _, exponent = torch.frexp(scaled)  # |scaled| in [0.5, 1) * 2**exponent
    return 0.5 * torch.exp2((exponent - 1).clamp_min(-6).double() - 3)


def raw(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized.data.view(torch.uint8), quantized.scale_inv.view(torch.int32)


def assert_same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    for left, right in zip(raw(a), raw(b), strict=True):
        assert torch.equal(left, right)


@by_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_value_is_within_half_a_step(
    fmt: BlockFP8, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = weights(*shape).to(dtype)
    quantized = quantize_weight(weight, fmt)
    exact = weight.double() / spread(quantized.scale_inv, weight.shape)
    # A float32 division may move the value by 2**-24 of itself before it is rounded.
    allowed = half_step(exact) + (0 if fmt.scales == "power_of_two" else exact.abs() * 2.0**-24)
    error = (quantized.data.double() - exact.clamp(-448, 448)).abs()
    assert bool((error <= allowed).all())
    dequantised = dequantize_weight(quantized.data, quantized.scale_inv)
    expected = quantized.data.double() * spread(quantized.scale_inv, weight.shape)
    assert torch.equal(dequantised, expected.float())
    assert bool((quantized.data.double().abs() < 2.0**-6).any())  # subnormals were tested


@by_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_come_from_each_block_alone(fmt: BlockFP8, shape: tuple[int, ...]) -> None:
    weight = weights(*shape)
    scales = quantize_weight(weight, fmt).scale_inv
    matrices = weight.reshape(-1, *shape[-2:]), scales.reshape(-1, *scales.shape[-2:])
    for matrix, grid in zip(*matrices, strict=True):
        rows, columns = matrix.shape
        for i, row in enumerate(range(0, rows, BLOCK)):
            for j, column in enumerate(range(0, columns, BLOCK)):
                amax = float(matrix[row : row + BLOCK, column : column + BLOCK].abs().max())
                assert float(grid[i, j]) == exact_scale(amax, fmt)


def exact_scale(amax: float, fmt: BlockFP8) -> float:
    amax = max(amax, float(np.float32(fmt.amax_floor)))
    if fmt.scales == "float32":
        return float(np.float32(amax) / np.float32(448))
    exponent = -200
    while Fraction(2) ** exponent < Fraction(amax) / 448:
        exponent += 1
    return 2.0**exponent


def amax_cases() -> torch.Tensor:
    """448 * 2**k and its neighbours, and random numbers, over the range of float32."""
    edges = np.float32(448.0) * np.exp2(np.arange(-40, 115, dtype=np.float32))
    random = np.exp2(np.random.default_rng(0).uniform(-33, 127, 2000)).astype(np.float32)
    infinity = np.float32(np.inf)
    cases = [edges, np.nextafter(edges, infinity), np.nextafter(edges, np.float32(0)), random]
    return torch.from_numpy(np.concatenate(cases).astype(np.float32))


def one_block_each(amax: torch.Tensor) -> torch.Tensor:
    row = torch.zeros(1, amax.numel() * BLOCK)
    row[0, ::BLOCK] = amax
    return row


def test_power_of_two_scales_follow_transformer_engines_rule() -> None:
    """Its kernel divides 448 by amax in float32 and clears the mantissa of the quotient."""
    amax = amax_cases()
    quotient = np.float32(448) / amax.numpy()
    truncated = (quotient.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    scales = quantize_weight(one_block_each(amax), BlockFP8("power_of_two")).scale_inv
    assert np.array_equal(scales[0].numpy(), np.float32(1) / truncated)
    for value, scale in zip(amax.tolist(), scales[0].tolist(), strict=True):
        assert scale == exact_scale(value, BlockFP8("power_of_two"))


@by_format
def test_the_largest_value_never_overflows(fmt: BlockFP8) -> None:
    quantized = quantize_weight(one_block_each(amax_cases()), fmt)
    largest = quantized.data.float()[0, ::BLOCK]
    assert not bool(quantized.data.float().isnan().any())
    assert bool((largest >= 224).all())
    if fmt.scales == "float32":
        assert bool((largest == 448).all())


def test_worked_example() -> None:
    row = torch.zeros(2, 3 * BLOCK)
    row[0, :2] = torch.tensor([448.0, -17.0])  # scale 1; 17 is between 16 and 18
    row[1, :3] = torch.tensor([19.0, 2.0**-10, 3 * 2.0**-10])  # ties, the last two subnormal
    row[0, BLOCK] = 449.0  # scale 2
    row[1, 2 * BLOCK] = -3.5  # 448 / 128
    quantized = quantize_weight(row, BlockFP8())
    assert quantized.scale_inv.tolist() == [[1.0, 2.0, 1 / 128]]
    data = quantized.data.float()
    assert data[0, :2].tolist() == [448.0, -16.0]
    assert data[1, :3].tolist() == [20.0, 0.0, 4 * 2.0**-10]
    assert data[0, BLOCK] == 224.0
    assert data[1, 2 * BLOCK] == -448.0


@by_format
def test_zero_and_tiny_blocks_take_the_floor(fmt: BlockFP8) -> None:
    weight = torch.zeros(BLOCK, 3 * BLOCK)
    weight[0, BLOCK] = 1e-31
    weight[0, 2 * BLOCK] = 1e-38
    weight[1, 0] = -0.0
    quantized = quantize_weight(weight, fmt)
    floor = exact_scale(fmt.amax_floor, fmt)
    assert quantized.scale_inv.tolist() == [[floor] * 3]
    back = dequantize_weight(quantized.data, quantized.scale_inv)
    assert bool((back[:, :BLOCK] == 0).all()) and bool((back[:, 2 * BLOCK :] == 0).all())
    assert float(back[0, BLOCK]) / 1e-31 == pytest.approx(1, rel=1 / 16)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_format
def test_non_finite_weights_are_refused_with_their_count(
    bad: float, dtype: torch.dtype, fmt: BlockFP8
) -> None:
    weight = weights(200, 300).to(dtype)
    weight[[0, 130, 199], [5, 140, 299]] = bad
    with pytest.raises(NonFiniteWeights, match=r"layer 3: .* 3 of 60,000 infinite or NaN"):
        quantize_weight(weight, fmt, name="layer 3")


@by_format
def test_bfloat16_and_its_float32_copy_give_the_same_bytes(fmt: BlockFP8) -> None:
    weight = weights(300, 500).bfloat16()
    assert_same(quantize_weight(weight, fmt), quantize_weight(weight.float(), fmt))
    x = quantize_activation(weight, fmt), quantize_activation(weight.float(), fmt)
    assert torch.equal(x[0].data.view(torch.uint8), x[1].data.view(torch.uint8))
    assert torch.equal(x[0].scale_inv, x[1].scale_inv)


@by_format
def test_quantising_again_changes_nothing(fmt: BlockFP8) -> None:
    once = quantize_weight(weights(3, 1000, 1200), fmt)
    assert_same(once, quantize_weight(weights(3, 1000, 1200), fmt))
    back = dequantize_weight(once.data, once.scale_inv)
    again = quantize_weight(back, fmt)
    assert torch.equal(dequantize_weight(again.data, again.scale_inv), back)
    stable = torch.ones_like(once.scale_inv, dtype=torch.bool)
    if fmt.scales == "power_of_two":
        stable = block_max(once.data.float()) > 224
    halved = torch.where(stable, once.scale_inv, once.scale_inv / 2)
    assert torch.equal(again.scale_inv, halved)
    everywhere = spread(stable, back.shape).bool()
    assert torch.equal(
        again.data.view(torch.uint8)[everywhere], once.data.view(torch.uint8)[everywhere]
    )
    assert bool(stable.any())


def block_max(data: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(
        data.abs(), (0, -data.size(-1) % BLOCK, 0, -data.size(-2) % BLOCK)
    )
    return padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).amax((-1, -3))


def test_a_block_that_rounds_to_224_keeps_its_values_under_half_the_scale() -> None:
    once = quantize_weight(torch.tensor([[230.0, 3.25]]), BlockFP8())
    assert once.scale_inv.item() == 1 and once.data.float().tolist() == [[224.0, 3.25]]
    again = quantize_weight(once.data.float(), BlockFP8())
    assert again.scale_inv.item() == 0.5 and again.data.float().tolist() == [[448.0, 6.5]]


def test_bfloat16_holds_dequantised_power_of_two_blocks() -> None:
    quantized = quantize_weight(weights(300, 500), BlockFP8())
    exact = dequantize_weight(quantized.data, quantized.scale_inv)
    narrow = dequantize_weight(quantized.data, quantized.scale_inv, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow.float(), exact)


@by_format
@pytest.mark.parametrize("rows", [256, 192])
def test_a_stack_is_its_matrices(fmt: BlockFP8, rows: int) -> None:
    stack = weights(3, rows, 200)
    whole = quantize_weight(stack, fmt)
    for i in range(3):
        assert_same(
            quantize_weight(stack[i], fmt), QuantizedWeight(whole.data[i], whole.scale_inv[i])
        )


@by_format
def test_strided_weights(fmt: BlockFP8) -> None:
    weight = weights(300, 500)
    assert_same(quantize_weight(weight.t(), fmt), quantize_weight(weight.t().contiguous(), fmt))
    stack = weights(2, 256, 256)
    turned = stack.transpose(1, 2)
    assert_same(quantize_weight(turned, fmt), quantize_weight(turned.contiguous(), fmt))


def test_writes_into_given_memory() -> None:
    weight = weights(300, 500)
    out = allocate_quantized(weight.shape)
    out.data.view(torch.uint8).fill_(0x7F)
    out.scale_inv.fill_(math.nan)
    assert quantize_weight(weight, BlockFP8(), out) is out
    assert_same(out, quantize_weight(weight, BlockFP8()))


def test_refuses_what_does_not_fit() -> None:
    fmt = BlockFP8()
    with pytest.raises(ValueError, match=r"expected \[N, K\]"):
        quantize_weight(torch.ones(128), fmt)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        quantize_weight(torch.ones(128, 128, dtype=torch.float64), fmt)
    with pytest.raises(ValueError, match=r"float32 scales \[2, 1\]"):
        quantize_weight(torch.ones(129, 128), fmt, allocate_quantized((128, 128)))
    wide = allocate_quantized((128, 256))
    with pytest.raises(ValueError, match="contiguous"):
        part = QuantizedWeight(wide.data[:, :128], wide.scale_inv[:, :1].contiguous())
        quantize_weight(torch.ones(128, 128), fmt, part)
    with pytest.raises(ValueError, match=r"scales of shape \[2, 1\]"):
        dequantize_weight(allocate_quantized((129, 128)).data, torch.ones(1, 1))
    with pytest.raises(UserError, match="scales"):
        BlockFP8("float16")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="floor"):
        BlockFP8(amax_floor=0.0)


@by_format
@pytest.mark.parametrize("columns", [256, 200, 3])
def test_activations_are_weights_of_one_row(fmt: BlockFP8, columns: int) -> None:
    x = weights(2, 3, columns)
    quantized = quantize_activation(x, fmt)
    assert quantized.scale_inv.shape == (2, 3, -(-columns // BLOCK))
    back = dequantize_activation(quantized.data, quantized.scale_inv)
    assert back.shape == x.shape
    for i in range(2):
        for j in range(3):
            row = quantize_weight(x[i, j][None], fmt)
            assert torch.equal(raw(row)[0][0], quantized.data[i, j].view(torch.uint8))
            assert torch.equal(row.scale_inv[0], quantized.scale_inv[i, j])
            assert torch.equal(dequantize_weight(row.data, row.scale_inv)[0], back[i, j])


@by_format
def test_inputs_are_left_alone(fmt: BlockFP8) -> None:
    weight = weights(256, 256)
    before = weight.clone()
    quantize_weight(weight, fmt)
    quantize_activation(weight, fmt)
    assert torch.equal(weight, before)


def test_a_gpus_taller_stripes_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(5 * BLOCK + 7, 300)
    expected = quantize_weight(weight, BlockFP8())
    monkeypatch.setattr(block_fp8, "CPU_STRIPE_ROWS", 2 * BLOCK)
    assert_same(quantize_weight(weight, BlockFP8()), expected)


@by_format
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_activation_shows(fmt: BlockFP8, bad: float) -> None:
    x = weights(2, 300)
    x[1, 140] = bad
    quantized = quantize_activation(x, fmt)
    back = dequantize_activation(quantized.data, quantized.scale_inv)
    assert bool(back[1, BLOCK : 2 * BLOCK].isnan().all())
    assert bool(back[0].isfinite().all()) and bool(back[1, :BLOCK].isfinite().all())


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE], ids=["dense", "moe"])
def test_which_tensors_are_quantised(config: dict[str, object]) -> None:
    names = tensor_shapes(config)
    kept = {name for name in names if not is_quantized(name)}
    assert all(
        name.endswith(("norm.weight", "mlp.gate.weight"))
        or name in ("model.embed_tokens.weight", "lm_head.weight")
        for name in kept
    )
    assert len(kept) == 3 + 2 * (5 if "num_experts" in config else 4)
    assert not is_quantized("model.layers.0.self_attn.q_proj.bias")
    assert not is_quantized("model.layers.0.self_attn.q_proj.weight_scale_inv")


def test_quantization_config() -> None:
    assert quantization_config(BlockFP8(), ["lm_head"]) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
