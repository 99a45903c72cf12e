# SPDX-License-Identifier: Apache-2.0
"""A digest is the sum that it says, adds up over slices, and notices what bridges get wrong."""

import pytest
import torch

from megatron.rl.rollout.errors import WeightsMismatch
from megatron.rl.rollout.transfer.digests import (
    EngineDigests,
    compare_digests,
    merge_digests,
    tensor_digest,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
MODULUS = 1 << 64


def hashed(stream: int, count: int) -> list[int]:
    """SplitMix64 in Python's integers."""
    result = []
    for index in range(1, count + 1):
        z = (stream + index * 0x9E3779B97F4A7C15) % MODULUS
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
        result.append(z ^ (z >> 31))
    return result


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def byte_weights_by_hand(count: int) -> list[int]:
    """c_b: 16 bytes of two hashes, little-endian, each times an odd multiplier."""
    multipliers = [m | 1 for m in hashed(0xA4093822299F31D0, 16)]
    words = hashed(0x13198A2E03707344, 2 * count)
    weights = []
    for first, second in zip(words[::2], words[1::2], strict=True):
        parts = first.to_bytes(8, "little") + second.to_bytes(8, "little")
        weights.append(sum(m * signed(d) for m, d in zip(multipliers, parts, strict=True)))
    return weights


def random_matrix(dtype: torch.dtype, rows: int = 300, columns: int = 259) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_weighted_sum_of_the_bytes(dtype: torch.dtype) -> None:
    matrix = random_matrix(dtype, 5, 7)
    content = matrix.view(torch.uint8).numpy().reshape(5, -1).tolist()
    rows = [r | 1 for r in hashed(0x243F6A8885A308D3, 5)]
    columns = byte_weights_by_hand(len(content[0]))
    total = sum(
        r * c * signed(byte)
        for r, line in zip(rows, content, strict=True)
        for c, byte in zip(columns, line, strict=True)
    )
    assert tensor_digest(matrix) == total % MODULUS


def test_wide_rows_are_cut() -> None:
    matrix = random_matrix(torch.float32, 3, 40_000)  # 160,000 bytes a row
    parts = [tensor_digest(matrix[:, :12_345]), tensor_digest(matrix[:, 12_345:], 0, 12_345)]
    assert sum(parts) % MODULUS == tensor_digest(matrix)
    extreme = torch.full((2, 40_000), -128, dtype=torch.int8).view(torch.float32)
    assert tensor_digest(extreme) != tensor_digest(extreme[:, :-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_at_their_places_add_up(dtype: torch.dtype) -> None:
    matrix = random_matrix(dtype)
    whole = tensor_digest(matrix)
    parts = [(0, 128, 0, 259), (128, 300, 0, 100), (128, 300, 100, 259)]
    digests = [tensor_digest(matrix[a:b, c:d], a, c) for a, b, c, d in parts]
    assert sum(digests) % MODULUS == whole
    assert tensor_digest(matrix.t().contiguous().t()) == whole, "strides do not matter"


def test_vectors_and_numbers() -> None:
    vector = random_matrix(torch.bfloat16)[0]
    assert tensor_digest(vector) == tensor_digest(vector[:, None])
    parts = tensor_digest(vector[:100]) + tensor_digest(vector[100:], 100)
    assert parts % MODULUS == tensor_digest(vector)
    assert tensor_digest(torch.zeros(0, 4)) == 0
    with pytest.raises(ValueError, match="matrix"):
        tensor_digest(torch.zeros(2, 2, 2))


def broken(kind: str, matrix: torch.Tensor) -> torch.Tensor:
    wrong = matrix.clone()
    if kind == "swapped rows":
        wrong[[3, 200]] = matrix[[200, 3]]
    elif kind == "swapped columns":
        wrong[:, [3, 200]] = matrix[:, [200, 3]]
    elif kind == "transposed block":
        wrong[:128, :128] = matrix[:128, :128].t()
    elif kind == "swapped blocks":
        wrong[:128, :128], wrong[128:256, :128] = matrix[128:256, :128], matrix[:128, :128]
    elif kind == "rolled":
        wrong = matrix.roll(1, 0)
    elif kind == "one bit":
        bits = wrong.view(torch.uint8).flatten()
        bits[1234] ^= 1
    elif kind == "zeros":
        wrong.zero_()
    return wrong


KINDS = "swapped rows,swapped columns,transposed block,swapped blocks,rolled,one bit,zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS.split(","))
def test_what_goes_wrong_is_noticed(kind: str, dtype: torch.dtype) -> None:
    matrix = random_matrix(dtype)
    wrong = broken(kind, matrix)
    assert not torch.equal(wrong, matrix)
    assert tensor_digest(wrong) != tensor_digest(matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_signed_zeros_and_subnormals_count_as_zero(dtype: torch.dtype) -> None:
    matrix = random_matrix(dtype)
    matrix[0, :4] = 0.0
    flushed = matrix.clone()
    matrix[0, 0], matrix[0, 1] = -0.0, torch.finfo(dtype).tiny / 2
    assert matrix[0, 1] != 0 or dtype == torch.float16
    assert tensor_digest(matrix) == tensor_digest(flushed)
    matrix[0, 2] = torch.finfo(dtype).tiny
    assert tensor_digest(matrix) != tensor_digest(flushed)


def test_workers_add_up_and_every_copy_counts() -> None:
    matrix = random_matrix(torch.float32)
    norm = random_matrix(torch.float32)[0]
    sent = {"w": tensor_digest(matrix), "norm": tensor_digest(norm), "packed": 7}
    workers = []
    for rank in (0, 1):
        held = EngineDigests()
        held.add("w", "w/0", tensor_digest(matrix[rank * 150 : rank * 150 + 150], rank * 150))
        held.add("norm", f"norm/{rank}", tensor_digest(norm))
        held.unmapped.add("experts.w2")
        workers.append(held.as_json())
    result = compare_digests(sent, merge_digests(workers), 3)
    assert result.compared == 2 and result.unmapped == ("experts.w2", "packed")

    workers[1]["digests"]["norm"]["norm/1"] ^= 1
    with pytest.raises(
        WeightsMismatch, match=rf"version 3 .*norm \(sent {sent['norm']:016x}, held"
    ):
        compare_digests(sent, merge_digests(workers), 3)
    with pytest.raises(WeightsMismatch, match="w "):
        compare_digests(sent, merge_digests(workers[:1]), 3)
