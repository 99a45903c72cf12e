# SPDX-License-Identifier: Apache-2.0
"""A range of a flattened matrix as rectangles of the matrix.

The distributed optimizer cuts a parameter by the number of its elements, wherever that falls. As
rectangles the cut has a place in the parameter that any other layout can find again, and no rank
needs to gather what others hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class FlatRectangle:
    """Elements ``[start, start + height * width)`` of a flattened matrix, and where they lie."""

    start: int
    row: int
    column: int
    height: int
    width: int


def rectangles(start: int, stop: int, columns: int, max_elements: int) -> Iterator[FlatRectangle]:
    """Yield the elements ``[start, stop)`` of a flattened matrix, in order, as rectangles.

    At most a piece of a row, whole rows, and a piece of a row; whole rows are divided further so
    that no rectangle has more than ``max_elements``, unless a single row does.

    Args:
        columns: of the matrix; a vector is a matrix with one column.
    """
    rows_at_once = max(1, max_elements // columns)
    while start < stop:
        row, column = divmod(start, columns)
        if column or stop - start < columns:
            height, width = 1, min(columns - column, stop - start)
        else:
            height, width = min(rows_at_once, (stop - start) // columns), columns
        yield FlatRectangle(start, row, column, height, width)
        start += height * width
