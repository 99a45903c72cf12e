# SPDX-License-Identifier: Apache-2.0
"""This rank's part of a policy's weights and optimizer state, placed in the whole tensors.

The keys are those of Megatron's own checkpoints, and so is the place of every element: Megatron's
``sharded_state_dict`` of the model says where a parameter lies in its global tensor, whatever the
layout, and the optimizer's tensors lie where their parameter does, under
``optimizer.state.<name>.<key>``. That is Megatron's ``fully_reshardable`` form. But where Megatron
gathers the optimizer of a data-parallel group on each of its ranks to write it, here every rank
writes the range that it holds, as rectangles, and reads only its range.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.rl.checkpoint.optimizer_state import (
    OptimizerSlice,
    is_distributed,
    optimizer_slices,
)
from megatron.rl.checkpoint.rectangles import rectangles
from megatron.rl.errors import UserError
from megatron.rl.policy.trained_model import TrainedModel

# A rank reads a saved piece whole, even if it needs a part of it: this bounds its host memory.
MAX_PIECE_BYTES = 64 << 20
OPTIMIZER_PREFIX = "optimizer.state"

# How Megatron names what it saves: each layer, each expert and each half of a gated layer has a
# key of its own, so that finding the pieces of a tensor never takes more than a few comparisons.
CONTENT_METADATA = {"singleton_local_shards": True, "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class PolicyShards:
    """What a rank saves or loads.

    Attributes:
        tensors: they share memory with the model and the optimizer.
        slices: of the optimizer, whose copies are written back after loading.
    """

    tensors: list[ShardedTensor]
    slices: list[OptimizerSlice]


def shards_to_save(policy: TrainedModel) -> PolicyShards:
    """Return what this rank writes; over all ranks each element of every tensor occurs once."""
    placed = _placed_parameters(policy)
    tensors: list[ShardedTensor] = []
    slices = list(optimizer_slices(policy.optimizer))
    for owned in slices:
        entry = placed[id(owned.parameter)]
        weights = owned.parameter.detach().view(-1)[owned.start : owned.stop]
        tensors += _slice_shards(entry, owned, {"": weights, **owned.tensors})
    optimized = {id(owned.parameter) for owned in slices}
    for identity, entry in placed.items():
        # A parameter in training that has no slice here is on other ranks of its group.
        elsewhere = entry.parameter.requires_grad and is_distributed(policy.optimizer)
        if identity not in optimized and not elsewhere:
            tensors += _whole_pieces(entry)
    return PolicyShards([t for t in tensors if is_main_replica(t.replica_id)], slices)


def shards_to_load(policy: TrainedModel, *, optimizer: bool = True) -> PolicyShards:
    """Return what this rank reads: all its weights, and its range of the optimizer's state."""
    placed = _placed_parameters(policy)
    tensors = [piece for entry in placed.values() for piece in _whole_pieces(entry)]
    slices = list(optimizer_slices(policy.optimizer)) if optimizer else []
    for owned in slices:
        tensors += _slice_shards(placed[id(owned.parameter)], owned, owned.tensors)
    return PolicyShards(tensors, slices)


@dataclass(frozen=True)
class _Piece:
    """Elements of a flattened parameter from ``start`` on that are contiguous in memory, as a
    block of a global tensor."""

    start: int
    block: ShardedTensor


@dataclass(frozen=True)
class _Placed:
    """A parameter or a saved buffer, and where its pieces lie."""

    parameter: Tensor
    pieces: list[_Piece]


def _placed_parameters(policy: TrainedModel) -> dict[int, _Placed]:
    """Everything that the model saves, by the identity of the tensor."""
    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata: dict[str, Any] = CONTENT_METADATA | {"dp_cp_group": data_group}
    placed: dict[int, _Placed] = {}
    for chunk in unwrap_model(policy.chunks):
        for entry in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            # Other objects are Transformer Engine's extra states: pickled, and empty but for
            # delayed scaling, whose history a few steps fill again.
            if isinstance(entry, ShardedTensor | ShardedTensorFactory):
                placed[id(entry.data)] = _Placed(entry.data, _pieces(entry))
    return placed


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> list[_Piece]:
    parameter = entry.data
    if "dequantize" in type(parameter).__dict__:
        raise UserError(
            f"{entry.key} is stored in FP8 by model.fp8_params, which checkpoints "
            "cannot hold; set it to false, or checkpoint.every to 0"
        )
    blocks = [entry] if isinstance(entry, ShardedTensor) else nested_values(entry.build())
    pieces = []
    for block in blocks:
        data = block.data.detach()
        assert data.is_contiguous() and data.ndim in (1, 2), (block.key, data.shape)
        start = data.storage_offset() - parameter.storage_offset()
        pieces.append(_Piece(start, _with_all_axes(block, data)))
    return pieces


def _with_all_axes(block: ShardedTensor, data: Tensor) -> ShardedTensor:
    """The block with the axes of its global tensor, and free of Megatron's regular grid."""
    shape = (1,) * block.prepend_axis_num + tuple(data.shape)
    return replace(
        block,
        data=data.view(shape),
        local_shape=shape,
        prepend_axis_num=0,
        axis_fragmentations=None,
    )


def _whole_pieces(entry: _Placed) -> Iterator[ShardedTensor]:
    """The pieces as they are, cut to size."""
    for piece in entry.pieces:
        flat = piece.block.data.view(-1)
        yield from _blocks(piece, 0, len(flat), flat, piece.block.key, piece.block.replica_id)


def _slice_shards(
    entry: _Placed, owned: OptimizerSlice, tensors: dict[str, Tensor]
) -> Iterator[ShardedTensor]:
    """The given tensors of a slice, each with the elements ``[owned.start, owned.stop)``."""
    for piece in entry.pieces:
        size = piece.block.data.numel()
        start = max(owned.start - piece.start, 0)
        stop = min(owned.stop - piece.start, size)
        if start >= stop:
            continue
        replica = piece.block.replica_id
        if owned.split:
            # Of the ranks that replicate the parameter, only this one has this range.
            replica = (*replica[:2], 0)
        first = piece.start + start - owned.start
        for name, tensor in tensors.items():
            key = f"{OPTIMIZER_PREFIX}.{name}.{piece.block.key}" if name else piece.block.key
            values = tensor[first : first + stop - start]
            yield from _blocks(piece, start, stop, values, key, replica)


def _blocks(
    piece: _Piece, start: int, stop: int, values: Tensor, key: str, replica: Any
) -> Iterator[ShardedTensor]:
    """Elements ``[start, stop)`` of a piece, whose values these are, as blocks of a global tensor.

    They share the values' memory.
    """
    template = piece.block
    is_vector = template.local_shape[-1] == template.data.numel()
    columns = 1 if is_vector else template.local_shape[-1]
    for part in rectangles(start, stop, columns, MAX_PIECE_BYTES // values.element_size()):
        within = (part.row,) if is_vector else (part.row, part.column)
        extent = (part.height,) if is_vector else (part.height, part.width)
        lead = len(template.local_shape) - len(within)
        shape = (1,) * lead + extent
        offset = [*template.global_offset]
        for axis, distance in enumerate(within, lead):
            offset[axis] += distance
        begin = part.start - start
        data = values[begin : begin + part.height * part.width].view(shape)
        yield replace(
            template,
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=shape,
            global_offset=tuple(offset),
            replica_id=replica,
        )


def reload_masters(policy: TrainedModel) -> None:
    """Take the optimizer's FP32 masters from the weights, after weights alone were loaded.

    Without it the next step would write the old masters over the new weights.
    """
    with torch.no_grad():
        policy.optimizer.reload_model_params()
