# SPDX-License-Identifier: Apache-2.0
"""The top-K log-probs of many tokens in few bytes.

Letters: N tokens, K entries a token. The worker encodes once; the same bytes travel, are recorded
and are trained on. With ``precision="fp24"`` and a vocabulary of at most 2**18 tokens an entry
takes 5.25 bytes: with K = 20, a token id and a version (4 bytes each) and the sampled token's own
float32 log-prob, 117 bytes a token. Of the mask decisions about tokens outside the trust region,
1.2 in 100,000 or fewer differ from those that float32 would give (benchmarks/rollout_transport.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import RolloutDataError

Precision = Literal["fp24", "float32"]

ABSENT_TOKEN_ID = -1

# A log-prob may exceed 0 only by rounding of a float32 log-softmax.
LOG_PROB_SLACK = 1e-5

# The OpenAI-style servers write this number where they mean "no value".
MISSING_LOG_PROB_SENTINEL = -9999.0

# Rows that are decoded at once where all of them are only looked at.
_ROWS_AT_ONCE = 1 << 16

_LOW_BITS = 16
# High bits of an id: none, 2 (four ids a byte) or 8.
_PACKED_BITS = 2
_PACKED_PER_BYTE = 4
# The bits of a float32 that fp24 drops.
_DROPPED_BITS = 8


@dataclass(frozen=True)
class TopKColumns:
    """K entries (id, log-prob) for each of N tokens, the largest first.

    An absent entry has log-prob -inf, and its id reads -1.

    ids_low [N, K] uint16    the low 16 bits of each id
    ids_high [N, H] uint8    what is above them: H = 0 up to 2**16 tokens in the vocabulary,
                             ceil(K / 4) with four 2-bit parts a byte up to 2**18, K beyond
    log_probs                [N, K] float32, or [N, 3 K] uint8: "fp24", the three high bytes
                             (little-endian) of each float32, rounded to nearest even. 16
                             significant bits: the error is at most 2**-16 of the log-prob
    """

    ids_low: NDArray[np.uint16]
    ids_high: NDArray[np.uint8]
    log_probs: NDArray[np.float32] | NDArray[np.uint8]

    @classmethod
    def encode(
        cls,
        ids: NDArray[np.integer[Any]],
        log_probs: NDArray[np.floating[Any]],
        vocab_size: int,
        precision: Precision = "fp24",
    ) -> "TopKColumns":
        """Encode ids [N, K] (-1 where absent) and log-probs [N, K] (-inf there).

        Raises RolloutDataError for an id outside ``-1 ... vocab_size - 1``, an id without a
        log-prob or the reverse, or NaN.
        """
        ids = np.asarray(ids, dtype=np.int64)
        values = np.ascontiguousarray(log_probs, dtype=np.float32)
        if ids.ndim != 2 or ids.shape != values.shape:
            raise RolloutDataError(
                f"top-K ids are {ids.shape} and log-probs {values.shape}, expected one [N, K] each"
            )
        if np.isnan(values).any():
            raise RolloutDataError("NaN among the top-K log-probs")
        if ((ids < ABSENT_TOKEN_ID) | (ids >= vocab_size)).any():
            raise RolloutDataError(f"top-K ids outside the vocabulary (0 ... {vocab_size - 1})")
        absent = ids == ABSENT_TOKEN_ID
        if (absent != np.isneginf(values)).any():
            raise RolloutDataError("top-K entries where only one of id -1 and log-prob -inf is set")
        stored = np.where(absent, 0, ids)
        high = _pack_high(stored >> _LOW_BITS, vocab_size)
        return cls(
            (stored & (2**_LOW_BITS - 1)).astype(np.uint16),
            high,
            _to_fp24(values) if precision == "fp24" else values,
        )

    @classmethod
    def empty(cls, vocab_size: int, k: int, precision: Precision = "fp24") -> "TopKColumns":
        """No tokens, of the given width."""
        none = np.zeros((0, k))
        return cls.encode(none.astype(np.int64), none, vocab_size, precision)

    def decode(self, rows: Any = slice(None)) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids [n, K] int32 and log-probs [n, K] float32 of the given rows."""
        part = self.take(rows)
        stored: NDArray[Any] = part.log_probs
        log_probs: NDArray[np.float32] = _from_fp24(stored) if stored.dtype == np.uint8 else stored
        ids = part.ids_low.astype(np.int32) | (
            _unpack_high(part.ids_high, part.k).astype(np.int32) << _LOW_BITS
        )
        return np.where(np.isneginf(log_probs), ABSENT_TOKEN_ID, ids).astype(np.int32), log_probs

    def take(self, rows: Any) -> "TopKColumns":
        """The rows that an index array, a mask or a slice picks."""
        return TopKColumns(self.ids_low[rows], self.ids_high[rows], self.log_probs[rows])

    @classmethod
    def concatenate(cls, parts: "Sequence[TopKColumns]") -> "TopKColumns":
        """Parts of the same width and encoding, one after the other; at least one."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def arrays(self, prefix: str = "topk_") -> dict[str, NDArray[Any]]:
        """The arrays by name, for a message or a file."""
        return {prefix + f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], prefix: str = "topk_"
    ) -> "TopKColumns":
        """Undo :meth:`arrays`."""
        return cls(*(arrays[prefix + f.name] for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.ids_low)

    @property
    def k(self) -> int:
        return self.ids_low.shape[1]

    @property
    def precision(self) -> Precision:
        return "fp24" if self.log_probs.dtype == np.uint8 else "float32"

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, f.name).nbytes for f in fields(self))

    def check_shapes(self) -> None:
        """Raise RolloutDataError unless the arrays fit each other."""
        n, k = self.ids_low.shape if self.ids_low.ndim == 2 else (0, -1)
        widths = {0, -(-k // _PACKED_PER_BYTE), k}
        expected_log_probs = {np.dtype(np.uint8): (n, 3 * k), np.dtype(np.float32): (n, k)}
        if (
            k < 0
            or self.ids_low.dtype != np.uint16
            or self.ids_high.dtype != np.uint8
            or self.ids_high.ndim != 2
            or len(self.ids_high) != n
            or self.ids_high.shape[1] not in widths
            or expected_log_probs.get(self.log_probs.dtype) != self.log_probs.shape
        ):
            raise RolloutDataError(
                "top-K arrays do not fit each other: "
                + ", ".join(
                    f"{name} {array.dtype} {array.shape}" for name, array in self.arrays("").items()
                )
            )

    def check_values(self, vocab_size: int) -> None:
        """Raise RolloutDataError unless all of it can be log-probs of tokens below vocab_size."""
        for start in range(0, len(self), _ROWS_AT_ONCE):
            ids, log_probs = self.decode(slice(start, start + _ROWS_AT_ONCE))
            for what, bad in (
                ("NaN among the top-K log-probs", np.isnan(log_probs)),
                ("top-K ids outside the vocabulary", ids >= vocab_size),
                (
                    "top-K log-probs above 0 or the sentinel -9999",
                    (log_probs > LOG_PROB_SLACK) | (log_probs == MISSING_LOG_PROB_SENTINEL),
                ),
            ):
                if bad.any():
                    row, column = (int(i) for i in np.argwhere(bad)[0])
                    raise RolloutDataError(
                        f"rollouts hold {what}: first at index {(start + row, column)}. Such "
                        "rollouts are not trained on; look at the weights that the engine last "
                        "received"
                    )


def _to_fp24(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits = values.view(np.uint32)
    half = np.uint32(2 ** (_DROPPED_BITS - 1) - 1)
    even = (bits >> np.uint32(_DROPPED_BITS)) & np.uint32(1)
    # -inf has a zero mantissa and stays; no finite log-prob is near enough to overflow.
    rounded = (bits + half + even) >> np.uint32(_DROPPED_BITS)
    count, k = values.shape
    as_bytes = rounded.astype("<u4").view(np.uint8).reshape(count, k, 4)
    return np.ascontiguousarray(as_bytes[:, :, :3]).reshape(count, 3 * k)


def _from_fp24(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    count, k = len(packed), packed.shape[1] // 3
    if k == 0:  # a view of nothing has strides that torch refuses
        return np.zeros((count, 0), dtype=np.float32)
    as_bytes = np.zeros((count, k, 4), dtype=np.uint8)
    as_bytes[:, :, 1:] = packed.reshape(count, k, 3)
    return as_bytes.reshape(count, 4 * k).view("<f4").astype(np.float32, copy=False)


def _pack_high(high: NDArray[np.int64], vocab_size: int) -> NDArray[np.uint8]:
    count, k = high.shape
    if vocab_size <= 2**_LOW_BITS:
        return np.zeros((count, 0), dtype=np.uint8)
    if vocab_size > 2 ** (_LOW_BITS + _PACKED_BITS):
        return high.astype(np.uint8)
    width = -(-k // _PACKED_PER_BYTE)
    padded = np.zeros((count, width * _PACKED_PER_BYTE), dtype=np.uint8)
    padded[:, :k] = high
    four = padded.reshape(count, width, _PACKED_PER_BYTE)
    shifts = np.arange(_PACKED_PER_BYTE, dtype=np.uint8) * _PACKED_BITS
    return np.bitwise_or.reduce(four << shifts, axis=2).astype(np.uint8)


def _unpack_high(packed: NDArray[np.uint8], k: int) -> NDArray[np.uint8]:
    count, width = packed.shape
    if width == 0:
        return np.zeros((count, k), dtype=np.uint8)
    if width == k:  # 8 bits each, or a single entry
        return packed
    shifts = np.arange(_PACKED_PER_BYTE, dtype=np.uint8) * _PACKED_BITS
    four = (packed[:, :, None] >> shifts) & np.uint8(2**_PACKED_BITS - 1)
    return four.reshape(count, width * _PACKED_PER_BYTE)[:, :k]
