# SPDX-License-Identifier: Apache-2.0
"""Digests of weights: one number per tensor, equal on both sides or the engine holds another one.

    D(W) = sum over rows i and bytes b of a row of  r_i  c_b  byte(W_ib)    modulo 2^64
    c_b  = sum over k of  m_k  d_bk

with odd 64-bit weights r_i and m_k and bytes d_bk (k = 1 ... 16) that SplitMix64 makes from the
positions. It depends on where every element is, so rows, experts or blocks in each other's places
change it, and it is a sum, so the digests of disjoint slices add up to that of the whole: each
tensor-parallel worker of an engine digests what it holds, at the position that it has in the
Hugging Face tensor. The sums over the bytes of a row are an exact product of 8-bit matrices, which
costs little more than reading the weights.

Zeros of either sign, and numbers below the smallest normal one, count as zero: kernels may flush
them, and the engine's side is sometimes read through a kernel (`loaded_parameters.py`).
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import WeightsMismatch

if TYPE_CHECKING:
    import torch

MODULUS = 1 << 64
_NAMES_SHOWN = 4
# Bytes of a tensor that are read together: in a CPU they stay in the cache, and a GPU wants more of
# them at a time.
_CPU_CHUNK_BYTES = 1 << 19
_GPU_CHUNK_BYTES = 1 << 24
# Bytes of a row in one product: 128 x 128 times this many stays below 2^31.
_MAX_ROW_BYTES = 1 << 16
_PRODUCTS = 16
_ROW_STREAM = np.uint64(0x243F6A8885A308D3)
_BYTE_STREAM = np.uint64(0x13198A2E03707344)
_PRODUCT_STREAM = np.uint64(0xA4093822299F31D0)
# Integer type with the same bits, and where those hold the exponent.
_VIEWS: Mapping[str, tuple[str, int]] = {
    "float32": ("int32", 0x7F800000),
    "bfloat16": ("int16", 0x7F80),
    "float16": ("int16", 0x7C00),
    "float8_e4m3fn": ("uint8", 0),
}


def tensor_digest(tensor: "torch.Tensor", row: int = 0, column: int = 0) -> int:
    """Digest of a slice that starts at (row, column) of its tensor; of a whole one by default.

    Vectors count as one column. Tensors are float32, bfloat16, float16 or e4m3, on any device.
    """
    import torch

    if tensor.dim() > 2:
        raise ValueError(f"a digest is of a matrix or a vector, got shape {list(tensor.shape)}")
    matrix = tensor.detach()
    matrix = matrix if matrix.dim() == 2 else matrix.reshape(-1, 1)
    rows, columns = matrix.shape
    if rows == 0 or columns == 0:
        return 0
    view, exponent = _VIEWS[str(tensor.dtype).removeprefix("torch.")]
    bits = matrix.view(getattr(torch, view))
    width = bits.element_size()
    limit = _GPU_CHUNK_BYTES if bits.is_cuda else _CPU_CHUNK_BYTES
    row_weights = _odd_weights(_ROW_STREAM, row, rows).to(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for left in range(0, columns, _MAX_ROW_BYTES // width):
        part = bits[:, left : left + _MAX_ROW_BYTES // width]
        row_bytes = part.size(1) * width
        byte_weights = _byte_weights((column + left) * width, row_bytes).to(bits.device)
        chunk = max(1, limit // row_bytes)
        for start in range(0, rows, chunk):
            sums = _row_sums(part[start : start + chunk], exponent, byte_weights)
            total += (sums * row_weights[start : start + chunk]).sum()
    return int(total) % MODULUS


def _row_sums(bits: "torch.Tensor", exponent: int, byte_weights: "torch.Tensor") -> "torch.Tensor":
    """Sum over the bytes of each row of byte x weight, modulo 2^64: int64 [rows]."""
    import torch

    if exponent:
        exponents = bits & exponent
        if not exponents.amin():  # several times faster than to look for each
            bits = bits.masked_fill(exponents == 0, 0)
    as_bytes = bits.contiguous().view(torch.int8)
    if bits.is_cuda:
        # CUDA's 8-bit product takes certain shapes only; float64 is exact far beyond these sums.
        products = (as_bytes.double() @ byte_weights.double()).long()
    else:
        products = torch._int_mm(as_bytes, byte_weights).long()
    multipliers = _odd_weights(_PRODUCT_STREAM, 0, _PRODUCTS).to(bits.device)
    return (products * multipliers).sum(1)


@functools.lru_cache(maxsize=256)
def _odd_weights(stream: np.uint64, start: int, count: int) -> "torch.Tensor":
    """Odd 64-bit weights of positions `start` ... `start + count - 1`, as int64."""
    import torch

    return torch.from_numpy((_split_mix(stream, start, count) | np.uint64(1)).astype(np.int64))


@functools.lru_cache(maxsize=64)
def _byte_weights(start: int, count: int) -> "torch.Tensor":
    """Weights of bytes `start` ... `start + count - 1` of a row: int8 [count, 16]."""
    import torch

    words = _PRODUCTS // 8
    hashed = _split_mix(_BYTE_STREAM, start * words, count * words).astype("<u8")
    return torch.from_numpy(hashed.view(np.int8).reshape(count, _PRODUCTS))


def _split_mix(stream: np.uint64, start: int, count: int) -> Any:
    """SplitMix64's outputs `start` ... `start + count - 1` of a stream."""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = stream + index * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@dataclass
class EngineDigests:
    """What an engine holds: digests by Hugging Face name, and what could not be mapped to one.

    digests   name -> copy -> digest. A tensor that several workers hold whole, or that is used
              twice (a tied head), has several copies, and each of them must be right
    unmapped  parameters, by the engine's names, whose layout is not the checkpoint's any more
    """

    digests: dict[str, dict[str, int]] = field(default_factory=dict)
    unmapped: set[str] = field(default_factory=set)

    def add(self, name: str, copy: str, digest: int) -> None:
        """Add the digest of one slice of one copy."""
        copies = self.digests.setdefault(name, {})
        copies[copy] = (copies.get(copy, 0) + digest) % MODULUS

    def as_json(self) -> dict[str, Any]:
        """Plain lists and dicts, for a message."""
        return {"digests": self.digests, "unmapped": sorted(self.unmapped)}


def merge_digests(parts: Iterable[Mapping[str, Any]]) -> EngineDigests:
    """Add up what the workers of an engine report (:meth:`EngineDigests.as_json`)."""
    whole = EngineDigests()
    for part in parts:
        for name, copies in part["digests"].items():
            for copy, digest in copies.items():
                whole.add(name, copy, digest)
        whole.unmapped.update(part["unmapped"])
    return whole


@dataclass(frozen=True)
class DigestComparison:
    """How many tensors were compared, and the names of those that the engine cannot map back."""

    compared: int
    unmapped: tuple[str, ...]


def compare_digests(sent: Mapping[str, int], held: EngineDigests, version: int) -> DigestComparison:
    """Raise WeightsMismatch unless every tensor that maps back is the one that was sent."""
    wrong = [
        f"{name} (sent {sent[name]:016x}, held {digest:016x})"
        for name, copies in held.digests.items()
        if name in sent
        for digest in copies.values()
        if digest != sent[name]
    ]
    if wrong:
        more = len(wrong) - _NAMES_SHOWN
        raise WeightsMismatch(
            f"after the update to version {version} the engine does not hold what was sent: "
            + ", ".join(wrong[:_NAMES_SHOWN])
            + (f" and {more} more" if more > 0 else "")
            + ". The bridge between trainer and engine is broken for these tensors; nothing may be "
            "generated with them"
        )
    mapped = held.digests.keys() & sent.keys()
    unmapped = (sent.keys() ^ held.digests.keys()) | held.unmapped
    return DigestComparison(len(mapped), tuple(sorted(unmapped)))
