# SPDX-License-Identifier: Apache-2.0
"""FP8 at the engine's end: the door of a CPU engine, and digests of what a GPU engine holds."""

import pytest
import torch

from megatron.rl.rollout.transfer.digests import MODULUS, tensor_digest
from megatron.rl.rollout.worker.fp8_door import Dequantizer
from megatron.rl.rollout.worker.loaded_parameters import Matrix, UnmappedError
from megatron.rl.weights.block_fp8 import BlockFP8, dequantize_weight, quantize_weight

FORMAT = BlockFP8()


def random_weight(rows: int = 4400, columns: int = 300) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_first", [False, True])
def test_weight_and_scales_meet_at_the_door(dtype: torch.dtype, scale_first: bool) -> None:
    quantized = quantize_weight(random_weight(200), FORMAT)
    norm = torch.ones(3)
    pair = [("a.weight", quantized.data), ("a.weight_scale_inv", quantized.scale_inv)]
    first, second = reversed(pair) if scale_first else pair
    door = Dequantizer(dtype)
    # In two buckets, with something else between them.
    passed = [*door([first, ("norm.weight", norm)]), *door([second])]
    door.check_empty()
    assert [name for name, _ in passed] == ["norm.weight", "a.weight"]
    assert passed[0][1] is norm
    expected = dequantize_weight(quantized.data, quantized.scale_inv, dtype)
    assert torch.equal(passed[1][1], expected) and passed[1][1].dtype == dtype


def test_a_weight_without_scales_does_not_get_through() -> None:
    quantized = quantize_weight(random_weight(200), FORMAT)
    door = Dequantizer(torch.bfloat16)
    assert list(door([("a.weight", quantized.data)])) == []
    with pytest.raises(RuntimeError, match=r"a\.weight"):
        door.check_empty()


def test_fp8_is_digested_by_its_values() -> None:
    quantized = quantize_weight(random_weight(), FORMAT)
    values = dequantize_weight(quantized.data, quantized.scale_inv, torch.bfloat16)
    matrix = Matrix(quantized.data, quantized.scale_inv)
    assert matrix.digest(0, 0) == tensor_digest(values)
    shards = [matrix.rows(0, 2560).digest(0, 0), matrix.rows(2560, 1840).digest(2560, 0)]
    assert sum(shards) % MODULUS == tensor_digest(values)
    # Other bytes for the same values: half the data (exactly), and twice the scales.
    coarse = random_weight(200).sign() * 2.0
    one = quantize_weight(coarse, FORMAT)
    other = Matrix((one.data.float() / 2).to(torch.float8_e4m3fn), one.scale_inv * 2)
    assert not torch.equal(other.data.view(torch.uint8), one.data.view(torch.uint8))
    assert other.digest(0, 0) == tensor_digest(coarse.bfloat16())
    stale = quantized.scale_inv.clone()
    stale[3, 1] *= 2
    assert Matrix(quantized.data, stale).digest(0, 0) != tensor_digest(values)
    with pytest.raises(UnmappedError, match="inside a block"):
        matrix.rows(100, 28)
