# SPDX-License-Identifier: Apache-2.0
"""Checks of arrays that cross a boundary, each with an error that says what arrived instead."""

import numpy as np
from numpy.typing import NDArray

from .errors import RolloutDataError


def check_array(
    name: str, array: NDArray[np.generic], dtype: type, ndim: int, error: type[Exception]
) -> None:
    """Raise `error` unless `array` has this type and number of dimensions."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        got = (
            f"{array.dtype} of shape {array.shape}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise error(f"{name} must be a {ndim}-d {np.dtype(dtype)} array, got {got}")


def check_offsets(
    name: str, offsets: NDArray[np.int64], total: int, error: type[Exception]
) -> None:
    """Raise `error` unless `offsets` rise from 0 to `total`."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        ends = "empty" if len(offsets) == 0 else f"{offsets[0]} ... {offsets[-1]}"
        raise error(f"{name} must rise from 0 to {total} without falling, got {ends}")


def check_none(what: str, bad: NDArray[np.bool_]) -> None:
    """Raise RolloutDataError when any entry is bad, and say how many and which is the first."""
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        where = first[0] if len(first) == 1 else first
        raise RolloutDataError(
            f"rollouts hold {what}: {int(bad.sum())} of {bad.size}, first at index {where}. "
            "Such rollouts are not trained on; look at the weights that the engine last received"
        )
