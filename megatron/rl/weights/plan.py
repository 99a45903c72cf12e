# SPDX-License-Identifier: Apache-2.0
"""The weight plan: which slice of which rank's parameter is which slice of a Hugging Face tensor.

Pure data, computed from the model's architecture and the parallel layout alone, the same on every
rank: loading reads it from right to left, gathering from left to right, and simulations count its
bytes. A plan checks itself before it is used: every element of every Hugging Face tensor comes
from exactly one piece, and every element of every parameter, vocabulary padding apart, is in one.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import LayerRun, ParallelConfig
from megatron.rl.weights.joins import Rectangle, Shard, cut, whole
from megatron.rl.weights.names import (
    HEAD,
    Join,
    Naming,
    Rule,
    Shape,
    embedding_rule,
    final_norm_rule,
    head_rule,
    hf_shapes,
    layer_rules,
)


class WeightPlanError(RuntimeError):
    """A plan that does not fit itself, the model or a checkpoint; no byte was moved."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's shard.

    Attributes:
        holders: the global ranks that hold this shard, all of them the same values.
        chunk: which of the rank's model chunks it is in (its virtual pipeline stage).
        name: as in the chunk's ``named_parameters()``.
        shape: of the shard.
        padding: how many rows at its end are vocabulary padding.
    """

    holders: range
    chunk: int
    name: str
    shape: Shape
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The part ``source`` of a parameter is the part ``target`` of a Hugging Face tensor."""

    parameter: Parameter
    source: Rectangle
    target: Rectangle


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A Hugging Face tensor and the pieces that it is made of.

    ``copies`` are further pieces that are loaded from it but never sent: the last pipeline stage's
    copy of a tied embedding.
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    copies: tuple[Piece, ...] = ()

    @property
    def numel(self) -> int:
        return whole(self.shape).numel


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter on one rank, and its pieces by the name of the tensor that they belong to."""

    parameter: Parameter
    pieces: list[tuple[str, Piece]]


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """Every Hugging Face tensor of a model in the order in which they are sent, and every shard.

    Build one with :func:`plan_weights`. Compared by identity: plans are keys of caches.
    """

    architecture: Architecture
    tensors: tuple[HFTensor, ...]
    parameters: tuple[Parameter, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, HFTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def held_by(self, rank: int) -> list[HeldParameter]:
        """Return the parameters of a rank."""
        held = {p: HeldParameter(p, []) for p in self.parameters if rank in p.holders}
        for tensor in self.tensors:
            for piece in (*tensor.pieces, *tensor.copies):
                if rank in piece.parameter.holders:
                    held[piece.parameter].pieces.append((tensor.name, piece))
        return list(held.values())

    def check(self) -> None:
        """Check that every element is written exactly once, in both directions.

        Raises:
            WeightPlanError: naming the first tensor or parameter that is not.
        """
        self._check_names()
        sources: dict[Parameter, list[Rectangle]] = {p: [] for p in self.parameters}
        for tensor in self.tensors:
            targets = tuple(piece.target for piece in tensor.pieces)
            if problem := _cover_problem(whole(tensor.shape), targets):
                raise WeightPlanError(f"weight plan: {tensor.name} {list(tensor.shape)} {problem}")
            for piece in (*tensor.pieces, *tensor.copies):
                _check_piece(tensor, piece)
                if piece.parameter not in sources:
                    raise WeightPlanError(
                        f"weight plan: {tensor.name} comes from {piece.parameter.name} on ranks "
                        f"{_ranks(piece.parameter.holders)}, which is not among the parameters"
                    )
                sources[piece.parameter].append(piece.source)
        for parameter, rectangles in sources.items():
            area = whole(parameter.shape)
            area = Rectangle(0, area.bottom - parameter.padding, 0, area.right)
            if problem := _cover_problem(area, tuple(rectangles)):
                raise WeightPlanError(
                    f"weight plan: {parameter.name} {list(parameter.shape)} on ranks "
                    f"{_ranks(parameter.holders)} {problem}"
                )

    def _check_names(self) -> None:
        expected = hf_shapes(self.architecture)
        found: dict[str, Shape] = {}
        for tensor in self.tensors:
            if tensor.name in found:
                raise WeightPlanError(f"weight plan: {tensor.name} occurs twice")
            found[tensor.name] = tensor.shape
        if problem := _names_problem(expected, found):
            raise WeightPlanError(f"weight plan: the model's tensors are not all there: {problem}")

    def check_against_model(self, chunks: Sequence[Any], rank: int) -> None:
        """Check that a rank's model chunks have exactly the parameters that the plan gives it.

        Raises:
            WeightPlanError: parameters are missing, unknown or of another shape.
        """
        expected = {_local(h.parameter): h.parameter.shape for h in self.held_by(rank)}
        found = {
            f"chunk {number}, {name}": tuple(parameter.shape)
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
        if problem := _names_problem(expected, found):
            raise WeightPlanError(
                f"the model's parameters on rank {rank} are not the weight plan's: {problem}"
            )

    def check_against_checkpoint(self, found: Mapping[str, Shape], where: str) -> None:
        """Check that a checkpoint has exactly the plan's tensors.

        A second copy of a tied head and stored rotary frequencies, which some writers add, are
        allowed.

        Args:
            found: names and shapes of its tensors.
            where: what to call it in an error.

        Raises:
            UserError: tensors are missing, unknown or of another shape.
        """
        extra = {name for name in found if name.endswith("rotary_emb.inv_freq")}
        if self.architecture.tied_embeddings:
            extra.add(HEAD)
        relevant = {name: shape for name, shape in found.items() if name not in extra}
        expected = {tensor.name: tensor.shape for tensor in self.tensors}
        if problem := _names_problem(expected, relevant):
            raise UserError(f"the weights in {where} do not match its config.json: {problem}")


@functools.lru_cache(maxsize=4)
def plan_weights(model: Architecture, layout: ParallelConfig, naming: Naming) -> WeightPlan:
    """Return the checked plan of a model in a layout; the same one when asked again.

    Args:
        naming: whose modules the model is built of: see :mod:`megatron.rl.weights.names`.
    """
    builder = _Builder(model, layout, naming)
    runs = layout.layer_runs(model.num_layers)
    first, last = runs[0], runs[-1]
    builder.add(embedding_rule(model), first)
    rules = layer_rules(model)
    for run in runs:
        for layer in range(run.count):
            for rule in rules:
                if rule.is_expert:
                    builder.add_experts(rule, run, layer)
                else:
                    builder.add(rule, run, layer)
    builder.add(final_norm_rule(model), last)
    if not model.tied_embeddings:
        builder.add(head_rule(model), last)
    elif layout.pipeline > 1:
        builder.add_copy(head_rule(model), last)
    plan = WeightPlan(model, tuple(builder.tensors.values()), tuple(builder.parameters))
    plan.check()
    return plan


class _Builder:
    """Collects the plan, rule by rule. Every rule is cut once, whatever the number of layers."""

    def __init__(self, model: Architecture, layout: ParallelConfig, naming: Naming) -> None:
        self.tensors: dict[str, HFTensor] = {}
        self.parameters: list[Parameter] = []
        self._model = model
        self._layout = layout
        self._naming = naming
        self._shards: dict[str, tuple[Shard, ...]] = {}

    def add(self, rule: Rule, run: LayerRun, layer: int = 0) -> None:
        """Add the tensors of a rule that is not of experts, for a layer of a run of layers."""
        pieces: dict[str, list[Piece]] = {name: [] for name in rule.hf}
        for name, piece in self._pieces(rule, run, layer):
            pieces[name].append(piece)
        for template, shape in rule.hf.items():
            name = template.format(layer=run.first + layer)
            self.tensors[name] = HFTensor(name, shape, tuple(pieces[template]))

    def add_copy(self, rule: Rule, run: LayerRun) -> None:
        """Add a parameter that holds a tensor which is already there."""
        for name, piece in self._pieces(rule, run, 0):
            tensor = self.tensors[name]
            self.tensors[name] = replace(tensor, copies=(*tensor.copies, piece))

    def add_experts(self, rule: Rule, run: LayerRun, layer: int) -> None:
        """Add the tensors of all experts of a layer for a rule of experts."""
        (shard,) = self._cut(rule, ways=1)
        experts = self._model.num_experts // self._layout.expert
        template = rule.parameter(self._naming)
        for expert in range(self._model.num_experts):
            parameter = Parameter(
                self._layout.expert_ranks(run.stage, expert // experts),
                run.chunk,
                template.format(layer=layer, expert=expert % experts),
                shard.shape,
            )
            self.parameters.append(parameter)
            for part in shard.parts:
                name = part.name.format(layer=run.first + layer, expert=expert)
                piece = Piece(parameter, part.source, part.target)
                self.tensors[name] = HFTensor(name, rule.hf[part.name], (piece,))

    def _pieces(self, rule: Rule, run: LayerRun, layer: int) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces of all shards, with the name of the tensor in the rule."""
        for rank, shard in enumerate(self._cut(rule, self._layout.tensor)):
            if rule.join is Join.WHOLE:
                holders = self._layout.stage_ranks(run.stage)
            else:
                holders = self._layout.tensor_ranks(run.stage, rank)
            name = rule.parameter(self._naming).format(layer=layer)
            parameter = Parameter(holders, run.chunk, name, shard.shape, shard.padding)
            self.parameters.append(parameter)
            for part in shard.parts:
                yield part.name, Piece(parameter, part.source, part.target)

    def _cut(self, rule: Rule, ways: int) -> tuple[Shard, ...]:
        if rule.local not in self._shards:
            padded = self._layout.padded_vocab_size(self._model.vocab_size)
            self._shards[rule.local] = cut(rule, self._model, ways, padded)
        return self._shards[rule.local]


def _check_piece(tensor: HFTensor, piece: Piece) -> None:
    source, target = piece.source, piece.target
    if (source.bottom - source.top, source.right - source.left) != (
        target.bottom - target.top,
        target.right - target.left,
    ):
        raise WeightPlanError(
            f"weight plan: {tensor.name}: {piece.parameter.name}[{source}] does not have the shape "
            f"of its place [{target}]"
        )


@functools.lru_cache(maxsize=4096)
def _cover_problem(area: Rectangle, parts: tuple[Rectangle, ...]) -> str | None:
    """Say what is wrong unless the parts cover the area exactly once, in bands of whole rows.

    Cached: the layers of a model are cut alike.
    """
    bands: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        bands.setdefault((part.top, part.bottom), []).append((part.left, part.right))
    if problem := _tiling_problem(sorted(bands), area.top, area.bottom, "rows"):
        return problem
    for columns in bands.values():
        if problem := _tiling_problem(sorted(columns), area.left, area.right, "columns"):
            return problem
    return None


def _tiling_problem(
    intervals: list[tuple[int, int]], start: int, stop: int, what: str
) -> str | None:
    """Say what is wrong unless the sorted intervals follow each other from start to stop."""
    position = start
    for first, end in intervals:
        if first > position:
            return f"has no source for {what} {position} to {first}"
        if first < position:
            return f"has two sources for {what} {first} to {min(position, end)}"
        position = end
    if position < stop:
        return f"has no source for {what} {position} to {stop}"
    if position > stop:
        return f"has {what} {stop} to {position} beyond its end"
    return None


def _names_problem(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> str | None:
    """Say which names are missing or unknown, or whose shapes differ."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    if missing or unknown:
        return "; ".join(
            f"{len(names)} {kind} (first: {names[0]})"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        )
    for name, shape in found.items():
        if shape != expected[name]:
            return f"{name} has shape {list(shape)}, expected {list(expected[name])}"
    return None


def _local(parameter: Parameter) -> str:
    return f"chunk {parameter.chunk}, {parameter.name}"


def _ranks(holders: range) -> str:
    step = f" in steps of {holders.step}" if holders.step > 1 else ""
    return f"{holders.start} to {holders.stop - 1}{step}"
