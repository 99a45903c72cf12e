# SPDX-License-Identifier: Apache-2.0
"""Which of the ranks that hold a piece sends it to which destination, and how many bytes that is.

A destination is a rank that owns an engine and wants every tensor. It takes a piece from itself if
it holds it, else from a rank of its node, else from any: spread over these ranks by bytes, and
differently for each destination, so that several of them read from different replicas at a time.
Pure data, the same on every rank.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.rl.weights.plan import Piece, WeightPlan

RanksPerNode = int | None
"""None: all ranks are on one node."""


@dataclass(frozen=True)
class Traffic:
    """Elements that move for one update of all destinations.

    Attributes:
        within_node: by (source, destination) on the same node, a rank to itself included.
        between_nodes: by (source, destination) on different nodes.
    """

    within_node: dict[tuple[int, int], int]
    between_nodes: dict[tuple[int, int], int]


class Routes:
    """The source of each piece for each destination.

    Args:
        plan: the weight plan.
        destinations: the ranks that want every tensor, each once.
        ranks_per_node: ranks with consecutive numbers share a node.

    Raises:
        ValueError: a destination that occurs twice or is no rank of the plan.
    """

    def __init__(
        self, plan: WeightPlan, destinations: Sequence[int], ranks_per_node: RanksPerNode = None
    ) -> None:
        world_size = 1 + max(parameter.holders[-1] for parameter in plan.parameters)
        if len(set(destinations)) < len(destinations) or not all(
            0 <= rank < world_size for rank in destinations
        ):
            raise ValueError(
                f"expected different ranks below {world_size} as destinations, got "
                f"{list(destinations)}"
            )
        self.plan = plan
        self.destinations = tuple(destinations)
        self._ranks_per_node = ranks_per_node or world_size
        self._turns = {rank: turn for turn, rank in enumerate(destinations)}
        self._shares = _shares_by_bytes(plan)
        self._candidates = functools.cache(self._find_candidates)

    def source(self, piece: Piece, destination: int) -> int:
        """Return the rank that a destination gets a piece from."""
        candidates = self._candidates(piece.parameter.holders, destination)
        if len(candidates) == 1:
            return candidates[0]
        share = int(self._shares[id(piece)] * len(candidates))
        return candidates[(share + self._turns[destination]) % len(candidates)]

    def same_node(self, rank: int, other: int) -> bool:
        return rank // self._ranks_per_node == other // self._ranks_per_node

    def traffic(self) -> Traffic:
        """Return how many elements each source sends to each destination."""
        traffic = Traffic({}, {})
        for destination in self.destinations:
            for tensor in self.plan.tensors:
                for piece in tensor.pieces:
                    source = self.source(piece, destination)
                    local = self.same_node(source, destination)
                    moved = traffic.within_node if local else traffic.between_nodes
                    key = source, destination
                    moved[key] = moved.get(key, 0) + piece.target.numel
        return traffic

    def _find_candidates(self, holders: range, destination: int) -> Sequence[int]:
        if destination in holders:
            return (destination,)
        near = [rank for rank in holders if self.same_node(rank, destination)]
        return near or holders


def _shares_by_bytes(plan: WeightPlan) -> dict[int, float]:
    """Return for each piece, by identity, the share of its holders' elements that lie before it.

    Replica n of N then sends those with a share of n/N to (n + 1)/N: as many bytes as the others.
    """
    before: dict[range, int] = {}
    start: list[tuple[Piece, int]] = []
    for tensor in plan.tensors:
        for piece in tensor.pieces:
            holders = piece.parameter.holders
            position = before.get(holders, 0)
            start.append((piece, position))
            before[holders] = position + piece.target.numel
    return {id(piece): position / before[piece.parameter.holders] for piece, position in start}
