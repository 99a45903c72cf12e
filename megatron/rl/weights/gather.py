# SPDX-License-Identifier: Apache-2.0
"""Gather a Megatron model, sharded in any layout, into whole Hugging Face tensors.

The weight plan says what each tensor is made of and from where; this carries it out. Tensors come
in the plan's order, in buckets. A bucket is one flat message from each rank that has some of it to
each destination; the messages of the next bucket are under way while the current one is used.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.rl.weights.joins import whole
from megatron.rl.weights.names import Shape
from megatron.rl.weights.plan import HFTensor, Piece, WeightPlan, WeightPlanError
from megatron.rl.weights.routes import RanksPerNode, Routes

BUCKET_BYTES = 256 * 1024**2

Allocate = Callable[[str, Shape], Tensor | None]
"""Where to put a tensor, of the type that it shall have; None leaves both to the gathering."""


def gather_hf_tensors(
    chunks: Sequence[torch.nn.Module],
    plan: WeightPlan,
    *,
    destinations: Sequence[int] = (0,),
    ranks_per_node: RanksPerNode = None,
    allocate: Allocate | None = None,
    value: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor of the model once, on each destination, in the plan's order.

    Collective: every rank iterates to the end; ranks that are no destination yield nothing.

    What is yielded may share memory with the model or with its neighbours in the bucket: copy it
    to keep it beyond the next change of the weights. A piece that lies on the destination itself
    is copied once, from the parameter into the place that ``allocate`` gives.

    Args:
        chunks: this rank's part of the model.
        plan: of the model, in the layout of these ranks.
        destinations: ranks that get every tensor.
        ranks_per_node: how many ranks share a node; pieces come from the own node where possible.
        allocate: called on destinations for each tensor when it is its turn.
        value: what to gather of a parameter, of its shape: by default its weights.
        bucket_bytes: size of what is under way at a time; up to two buckets are held.

    Raises:
        WeightPlanError: on every rank, before anything is sent: some rank's model is not the
            plan's, or not all values are of one type.
    """
    values = _checked_values(chunks, plan, value)
    like = next(iter(values.values()))
    if like.is_cuda:
        # Under NCCL the first point-to-point batch of a group needs all of its ranks (see
        # torch.distributed.batch_isend_irecv), and here a rank may have nothing to send.
        dist.all_reduce(like.new_zeros(1))
    steps = _steps(
        plan,
        tuple(destinations),
        ranks_per_node,
        dist.get_rank(),
        max(1, bucket_bytes // like.element_size()),
    )
    current: _Transfer | None = None
    for step in steps:
        following = _Transfer(step, values, like)
        if current is not None:
            yield from current.finish(allocate)
        current = following
    if current is not None:
        yield from current.finish(allocate)


_Values = Mapping[tuple[int, str], Tensor]


def _checked_values(
    chunks: Sequence[torch.nn.Module],
    plan: WeightPlan,
    value: Callable[[torch.nn.Parameter], Tensor],
) -> _Values:
    """Return what to gather of each parameter, by chunk and name; the ranks agree that it is right.

    A rank that raised alone would leave the others waiting for its messages, and one with values of
    another type would send them messages of another size.
    """
    problem: str | None = None
    values: dict[tuple[int, str], Tensor] = {}
    try:
        plan.check_against_model(chunks, dist.get_rank())
        values = {
            (number, name): value(parameter)
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
    except WeightPlanError as error:
        problem = str(error)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (problem, {str(value.dtype) for value in values.values()}))
    for problem, _ in reports:
        if problem is not None:
            raise WeightPlanError(problem)
    dtypes = set[str]().union(*(of_rank for _, of_rank in reports))
    if len(dtypes) > 1:
        raise WeightPlanError(f"expected values of one type on all ranks, got {sorted(dtypes)}")
    return values


@dataclass(frozen=True)
class _Step:
    """This rank's share of one bucket.

    Attributes:
        sends: the pieces that go to each destination, in order.
        receives: how many elements come from each source; empty if this rank is no destination.
        assembles: the bucket's tensors, with the source of each piece; likewise.
    """

    sends: dict[int, list[Piece]] = field(default_factory=dict)
    receives: dict[int, int] = field(default_factory=dict)
    assembles: list[tuple[HFTensor, list[int]]] = field(default_factory=list)


@functools.lru_cache(maxsize=4)
def _steps(
    plan: WeightPlan,
    destinations: tuple[int, ...],
    ranks_per_node: RanksPerNode,
    rank: int,
    bucket_numel: int,
) -> list[_Step]:
    """Return this rank's steps; every rank's have the same buckets. Cached: updates repeat."""
    routes = Routes(plan, destinations, ranks_per_node)
    steps: list[_Step] = []
    size = bucket_numel
    for tensor in plan.tensors:
        if size + tensor.numel > bucket_numel:
            steps.append(_Step())
            size = 0
        size += tensor.numel
        step = steps[-1]
        if rank in destinations:
            sources = [routes.source(piece, rank) for piece in tensor.pieces]
            step.assembles.append((tensor, sources))
            for piece, source in zip(tensor.pieces, sources, strict=True):
                if source != rank:
                    step.receives[source] = step.receives.get(source, 0) + piece.target.numel
        for piece in tensor.pieces:
            if rank not in piece.parameter.holders:
                continue
            for destination in destinations:
                if destination != rank and routes.source(piece, destination) == rank:
                    step.sends.setdefault(destination, []).append(piece)
    return steps


class _Transfer:
    """One bucket on its way; its messages are posted when it is made."""

    def __init__(self, step: _Step, values: _Values, like: Tensor) -> None:
        self._step = step
        self._values = values
        self._received = {s: like.new_empty(numel) for s, numel in step.receives.items()}
        self._sent = {
            destination: torch.cat([self._local(piece).reshape(-1) for piece in pieces])
            for destination, pieces in step.sends.items()
        }
        messages = [dist.P2POp(dist.irecv, flat, s) for s, flat in self._received.items()]
        messages += [dist.P2POp(dist.isend, flat, d) for d, flat in self._sent.items()]
        self._works = dist.batch_isend_irecv(messages) if messages else []

    def finish(self, allocate: Allocate | None) -> Iterator[tuple[str, Tensor]]:
        """Wait for the messages and yield the bucket's tensors, each assembled when asked for."""
        for work in self._works:
            work.wait()
        self._sent.clear()
        positions = dict.fromkeys(self._received, 0)
        for tensor, sources in self._step.assembles:
            parts = []
            for piece, source in zip(tensor.pieces, sources, strict=True):
                if source in self._received:
                    start = positions[source]
                    positions[source] += piece.target.numel
                    flat = self._received[source][start : positions[source]]
                    parts.append(flat.view(_shape(piece, len(tensor.shape))))
                else:
                    parts.append(self._local(piece))
            yield tensor.name, _assemble(tensor, parts, allocate)

    def _local(self, piece: Piece) -> Tensor:
        parameter = piece.parameter
        values = self._values[parameter.chunk, parameter.name]
        if piece.source == whole(parameter.shape):
            return values
        return values[piece.source.index(values.dim())]


def _shape(piece: Piece, dimensions: int) -> Shape:
    target = piece.target
    columns = target.right - target.left
    return (columns,) if dimensions == 1 else (target.bottom - target.top, columns)


def _assemble(tensor: HFTensor, parts: list[Tensor], allocate: Allocate | None) -> Tensor:
    place = allocate(tensor.name, tensor.shape) if allocate else None
    if place is None:
        if len(parts) == 1:
            return parts[0]
        place = parts[0].new_empty(tensor.shape)
    elif tuple(place.shape) != tensor.shape:
        raise ValueError(
            f"allocate gave a place of shape {list(place.shape)} for {tensor.name}, which has "
            f"{list(tensor.shape)}"
        )
    if len(parts) == 1:
        return place.copy_(parts[0])
    for piece, part in zip(tensor.pieces, parts, strict=True):
        place[piece.target.index(place.dim())].copy_(part)
    return place
