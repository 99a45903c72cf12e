# SPDX-License-Identifier: Apache-2.0
"""Emulated blockwise FP8 against products of operands that a float64 oracle quantised."""

import numpy as np
import pytest
import torch

from megatron.rl.errors import UserError
from megatron.rl.model.fp8 import FP8Settings
from megatron.rl.model.fp8_emulation import (
    BlockwiseLinear,
    BlockwiseRecipe,
    emulated_recipe,
)
from megatron.rl.weights.block_fp8 import (
    BlockFP8,
    NonFiniteWeights,
    dequantize_activation,
    quantize_activation,
)
from tests.unit import fp8_oracle
from tests.unit.fp8_oracle import E4M3, E5M2, LinearOracle

FLOAT32_EPSILON = 2.0**-24
# Tokens, features in, features out: whole blocks, ragged in each dimension, smaller than a block.
SHAPES = ((256, 128, 256), (200, 300, 130), (5, 64, 33), (1, 129, 1))
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_scales = pytest.mark.parametrize("scales", ["power_of_two", "float32"])
by_format = pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])


def operands(shape: tuple[int, int, int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Sizes differ by row and by column, so that blocks along either have other scales."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        sizes = [10 ** torch.empty(n).uniform_(-2, 2, generator=generator) for n in (rows, columns)]
        noise = torch.randn(rows, columns, generator=generator)
        return noise * sizes[0][:, None] * sizes[1]

    return matrix(tokens, inputs), matrix(outputs, inputs), matrix(tokens, outputs)


def emulate(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, recipe: BlockwiseRecipe
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    y = BlockwiseLinear.apply(x, weight, recipe)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def oracle_of(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, scales: str, fp8_format: str
) -> LinearOracle:
    arrays = (t.double().numpy() for t in (x, weight, dy))
    return fp8_oracle.linear(
        *arrays, scales=scales, gradients=E5M2 if fp8_format == "hybrid" else E4M3
    )


@by_scales
@by_format
@by_shape
def test_all_three_products_are_those_of_quantised_operands(
    shape: tuple[int, int, int], scales: str, fp8_format: str
) -> None:
    x, weight, dy = operands(shape)
    settings = FP8Settings("blockwise", format=fp8_format, scales=scales)
    results = emulate(x, weight, dy, emulated_recipe(settings))
    oracle = oracle_of(x, weight, dy, scales, fp8_format)
    tokens, inputs, outputs = shape
    for result, exact, size, terms in (
        (results[0], oracle.output, oracle.output_size, inputs),
        (results[1], oracle.dx, oracle.dx_size, outputs),
        (results[2], oracle.dw, oracle.dw_size, tokens),
    ):
        # float32 sums of so many terms; with float32 scales a dequantised value is rounded too.
        allowed = (terms + 4) * FLOAT32_EPSILON * size
        assert (np.abs(result.double().numpy() - exact) <= allowed).all()


@by_shape
def test_bfloat16_operands_give_the_same_products_rounded_once(
    shape: tuple[int, int, int],
) -> None:
    x, weight, dy = (t.bfloat16() for t in operands(shape))
    recipe = emulated_recipe(FP8Settings("blockwise"))
    results = emulate(x, weight, dy, recipe)
    exact = emulate(x.float(), weight.float(), dy.float(), recipe)
    for result, wide in zip(results, exact, strict=True):
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, wide.bfloat16())


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    x, weight, dy = operands((0, 64, 32))
    y, dx, dw = emulate(x, weight, dy, emulated_recipe(FP8Settings("blockwise")))
    assert y.shape == (0, 32) and dx.shape == (0, 64)
    assert torch.equal(dw, torch.zeros(32, 64))


def test_a_frozen_weight_and_an_input_without_gradient_get_none() -> None:
    x, weight, dy = operands((7, 64, 32))
    recipe = emulated_recipe(FP8Settings("blockwise"))
    x.requires_grad_()
    BlockwiseLinear.apply(x, weight, recipe).backward(dy)
    assert x.grad is not None and weight.grad is None
    weight.requires_grad_()
    BlockwiseLinear.apply(x.detach(), weight, recipe).backward(dy)
    assert weight.grad is not None


def engine_rule(amax: np.float32, table: fp8_oracle.FloatTable) -> np.float32:
    """Transformer Engine's power-of-two scale as its kernel states it, in its own operations."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(table.largest) / amax
    if np.isinf(scale):
        scale = np.finfo(np.float32).max
    return np.float32(1) / np.uint32(scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)


@pytest.mark.parametrize("table", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_scales_of_tiny_and_huge_blocks_are_transformer_engines(
    table: fp8_oracle.FloatTable,
) -> None:
    dtype = torch.float8_e4m3fn if table is E4M3 else torch.float8_e5m2
    edges = np.float32(table.largest) * np.exp2(np.arange(-105, 112, dtype=np.float32))
    edges = edges[(edges >= 1e-30) & np.isfinite(edges)]
    up, down = (np.nextafter(edges, np.float32(end)) for end in (np.inf, 0))
    largest = np.finfo(np.float32).max
    amax = np.concatenate([edges, up, down[down >= 1e-30], [1e-30, 1e-10, 1.0, largest]])
    amax = amax[np.isfinite(amax)].astype(np.float32)
    x = torch.zeros(len(amax), fp8_oracle.BLOCK)
    x[:, 3] = torch.from_numpy(amax)
    quantized = quantize_activation(x, BlockFP8(), dtype)
    expected = np.array([engine_rule(a, table) for a in amax])
    assert np.array_equal(quantized.scale_inv[:, 0].numpy(), expected)
    assert bool((quantized.data.float()[:, 3] <= table.largest).all())


def test_zero_and_subnormal_blocks_differ_from_transformer_engine_in_scales_only() -> None:
    """It gives a zero block the scale 1 and has no floor; the values that products see agree."""
    x = torch.zeros(3, fp8_oracle.BLOCK)
    x[1, 0], x[2, 0] = -0.0, 1e-38
    quantized = quantize_activation(x, BlockFP8())
    values = dequantize_activation(quantized.data, quantized.scale_inv)
    assert bool(quantized.scale_inv.isfinite().all())
    assert torch.equal(values[:2], torch.zeros(2, fp8_oracle.BLOCK))
    assert float((values - x).abs().max()) <= 1e-30 * 2**-9, "below the floor, and lost"


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_is_seen_not_saturated(bad: float) -> None:
    """Transformer Engine saturates an infinity to 448 and goes on; here the step fails."""
    x, weight, dy = operands((4, 256, 8))
    x[1, 5] = bad
    y = emulate(x, weight, dy, emulated_recipe(FP8Settings("blockwise")))[0]
    assert bool(y[1].isnan().all())
    assert bool(y[[0, 2, 3]].isfinite().all())
    weight[2, 2] = bad
    with pytest.raises(NonFiniteWeights):
        BlockwiseLinear.apply(x, weight, emulated_recipe(FP8Settings("blockwise")))


def test_what_cannot_be_emulated_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.fp8 is mxfp8.*emulates blockwise only"):
        emulated_recipe(FP8Settings("mxfp8"))
    with pytest.raises(UserError, match=r"model\.fp8_params"):
        emulated_recipe(FP8Settings("blockwise", params=True))


def test_the_oracle_rounds_as_numbers_say() -> None:
    assert E4M3.largest == 448 and E5M2.largest == 57344
    assert E4M3.magnitudes[1] == 2.0**-9 and E5M2.magnitudes[1] == 2.0**-16
    values = np.array([17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 460.0, 0.3])
    assert E4M3.round(values).tolist() == [16, 20, -16, 0, 2.0**-8, 448, 0.3125]
    assert fp8_oracle.scale_inv(448.0, E4M3, "power_of_two") == 1
    assert fp8_oracle.scale_inv(449.0, E4M3, "power_of_two") == 2
