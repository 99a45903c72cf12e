# SPDX-License-Identifier: Apache-2.0
"""Block FP8 written out again in float64: a table of the FP8 numbers, and scales from frexp."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BLOCK = 128


@dataclass(frozen=True)
class FloatTable:
    """The magnitudes of an FP8 type in order; the parity of a place is that of its mantissa."""

    magnitudes: Array

    @property
    def largest(self) -> float:
        return float(self.magnitudes[-1])

    def round(self, values: Array) -> Array:
        """Round to the nearest magnitude, ties to the even place; beyond the last, to the last."""
        magnitude = np.abs(values)
        above = np.clip(np.searchsorted(self.magnitudes, magnitude), 1, len(self.magnitudes) - 1)
        low, high = self.magnitudes[above - 1], self.magnitudes[above]
        middle = (low + high) / 2
        up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
        return np.copysign(np.where(up, high, low), values)


def _table(exponent_bits: int, mantissa_bits: int, places: int) -> FloatTable:
    bias = 2 ** (exponent_bits - 1) - 1
    magnitudes = []
    for place in range(places):
        exponent, mantissa = divmod(place, 2**mantissa_bits)
        whole = mantissa / 2**mantissa_bits + (1 if exponent else 0)
        magnitudes.append(whole * 2.0 ** (max(exponent, 1) - bias))
    return FloatTable(np.array(magnitudes))


# Of 128 bit patterns without sign, e4m3fn has one NaN; e5m2 has an infinity and three NaNs.
E4M3 = _table(4, 3, 127)
E5M2 = _table(5, 2, 124)


def scale_inv(amax: float, table: FloatTable, scales: str) -> float:
    """The scale of a block of this amax > 0."""
    if scales == "float32":
        return float(np.float32(amax) / np.float32(table.largest))
    mantissa, exponent = np.frexp(np.float64(amax) / table.largest)  # in [0.5, 1) * 2**exponent
    return float(np.ldexp(1.0, int(exponent) - (1 if mantissa == 0.5 else 0)))


def round_block(block: Array, table: FloatTable, scales: str) -> Array:
    """Quantise and dequantise one block."""
    amax = float(np.abs(block).max(initial=0.0))
    if amax == 0.0:
        return block
    scale = scale_inv(amax, table, scales)
    scaled = block / scale
    if scales == "float32":  # the quotient is a float32 too
        scaled = scaled.astype(np.float32).astype(np.float64)
    return table.round(scaled) * scale


def round_rows(x: Array, scales: str, table: FloatTable = E4M3) -> Array:
    """In blocks of 1 x 128 along the last dimension of [T, K]."""
    rounded = np.zeros_like(x)
    for row in range(x.shape[0]):
        for left in range(0, x.shape[1], BLOCK):
            part = np.s_[row, left : left + BLOCK]
            rounded[part] = round_block(x[part], table, scales)
    return rounded


def round_tiles(weight: Array, scales: str) -> Array:
    """In blocks of 128 x 128."""
    rounded = np.zeros_like(weight)
    for top in range(0, weight.shape[0], BLOCK):
        for left in range(0, weight.shape[1], BLOCK):
            part = np.s_[top : top + BLOCK, left : left + BLOCK]
            rounded[part] = round_block(weight[part], E4M3, scales)
    return rounded


@dataclass(frozen=True)
class LinearOracle:
    """Output, both gradients, and for each the sum of magnitudes that bounds its rounding."""

    output: Array
    dx: Array
    dw: Array
    output_size: Array
    dx_size: Array
    dw_size: Array


def linear(
    x: Array, weight: Array, dy: Array, *, scales: str, gradients: FloatTable = E4M3
) -> LinearOracle:
    """Y = q(X) q2(W)^T, dX = q(dY) q2(W), dW = q(dY^T) q(X^T)^T, exact but for float64."""
    w = round_tiles(weight, scales)
    x_rows, x_columns = round_rows(x, scales), round_rows(x.T, scales)
    dy_rows = round_rows(dy, scales, gradients)
    dy_columns = round_rows(dy.T, scales, gradients)
    size = np.abs
    return LinearOracle(
        output=x_rows @ w.T,
        dx=dy_rows @ w,
        dw=dy_columns @ x_columns.T,
        output_size=size(x_rows) @ size(w).T,
        dx_size=size(dy_rows) @ size(w),
        dw_size=size(dy_columns) @ size(x_columns).T,
    )
