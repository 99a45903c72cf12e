# SPDX-License-Identifier: Apache-2.0
"""How one Megatron parameter is cut over tensor-parallel ranks, and which tensors each shard holds.

The only place that knows the joins. Vectors are matrices of one row here, so that there is one kind
of rectangle.
"""

from dataclasses import dataclass

from megatron.rl.model.architecture import Architecture
from megatron.rl.weights.names import Join, Rule, Shape


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows ``[top, bottom)`` and columns ``[left, right)`` of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def numel(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def index(self, dimensions: int) -> tuple[slice, ...]:
        """Return what to index a tensor of 1 or 2 dimensions with to get this part of it."""
        rows, columns = slice(self.top, self.bottom), slice(self.left, self.right)
        return (columns,) if dimensions == 1 else (rows, columns)


def whole(shape: Shape) -> Rectangle:
    """Return the rectangle of a whole tensor of 1 or 2 dimensions."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    return Rectangle(0, rows, 0, columns)


@dataclass(frozen=True, slots=True)
class Part:
    """The part ``source`` of a shard is the part ``target`` of a Hugging Face tensor."""

    name: str
    source: Rectangle
    target: Rectangle


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor-parallel rank's part of a parameter; its last ``padding`` rows hold nothing."""

    shape: Shape
    parts: tuple[Part, ...]
    padding: int = 0


def cut(rule: Rule, model: Architecture, ways: int, padded_vocab_size: int) -> tuple[Shard, ...]:
    """Return the shards of a rule's parameter, one per tensor-parallel rank (one if not sharded).

    Args:
        ways: the tensor-parallel size; 1 for experts, each of which is whole on its rank.
        padded_vocab_size: rows of the whole embedding and head.
    """
    if rule.join is Join.WHOLE:
        ((name, shape),) = rule.hf.items()
        return (Shard(shape, (Part(name, whole(shape), whole(shape)),)),)
    if rule.join is Join.COLUMNS:
        ((name, (rows, columns)),) = rule.hf.items()
        width = columns // ways
        return tuple(
            Shard(
                (rows, width),
                (Part(name, Rectangle(0, rows, 0, width), _columns(rows, r * width, width)),),
            )
            for r in range(ways)
        )
    runs = _row_runs(rule, model, ways)
    total = padded_vocab_size if rule.join is Join.VOCAB else sum(run.count for run in runs)
    height = total // ways
    columns = next(iter(rule.hf.values()))[1]
    return tuple(_row_shard(runs, r * height, height, columns) for r in range(ways))


def _columns(rows: int, left: int, width: int) -> Rectangle:
    return Rectangle(0, rows, left, left + width)


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows ``[first, first + count)`` of a tensor that follow each other in the parameter."""

    name: str
    first: int
    count: int


def _row_runs(rule: Rule, model: Architecture, ways: int) -> list[_Run]:
    """Return the rows of the whole parameter, from its first, as runs of the tensors' rows."""
    names = list(rule.hf)
    if rule.join is Join.VOCAB:
        return [_Run(names[0], 0, model.vocab_size)]
    if rule.join is Join.GATE_UP:
        rows = rule.hf[names[0]][0] // ways
        return [_Run(name, r * rows, rows) for r in range(ways) for name in names]
    assert rule.join is Join.QKV
    per_group = model.num_heads // model.num_groups * model.head_dim, model.head_dim, model.head_dim
    return [
        _Run(name, group * rows, rows)
        for group in range(model.num_groups)
        for name, rows in zip(names, per_group, strict=True)
    ]


def _row_shard(runs: list[_Run], start: int, height: int, columns: int) -> Shard:
    """Return the shard of rows ``[start, start + height)``; what no run reaches is padding."""
    parts, position = [], 0
    for run in runs:
        top, bottom = max(position, start), min(position + run.count, start + height)
        if top < bottom:
            source = Rectangle(top - start, bottom - start, 0, columns)
            shift = run.first - position
            parts.append(Part(run.name, source, Rectangle(top + shift, bottom + shift, 0, columns)))
        position += run.count
    padding = min(height, max(0, start + height - position))
    return Shard((height, columns), tuple(parts), padding)
