# SPDX-License-Identifier: Apache-2.0
"""What a vLLM model computes with, mapped back to the tensors of a Hugging Face checkpoint.

vLLM joins tensors (q, k, v; gate, up; the experts of a layer), shards them over its workers, and
on some backends repacks them for a kernel. Here each worker says which part of which tensor it
holds. Where a layer keeps no readable copy, the weights are read through the kernel that uses them
(CPU linear layers) or unpacked exactly (CPU experts). What cannot be mapped is listed by name: it
is left to the log-prob probe, and never guessed.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.rl.weights.block_fp8 import BLOCK, dequantize_weight, scale_shape

from ..transfer.digests import MODULUS, EngineDigests, tensor_digest

# Columns of a CPU layer's weight that are read through its kernel at a time.
_PROBE_ROWS = 256
# Rows of an FP8 weight that are dequantised at a time: whole blocks.
_DEQUANTIZED_ROWS = 16 * BLOCK
# Backends that leave the experts in the checkpoint's layout.
_PLAIN_EXPERT_BACKENDS = ("TRITON", "BATCHED_TRITON")
_SHARDS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class UnmappedError(Exception):
    """A parameter whose layout is not the checkpoint's."""


@dataclass(frozen=True)
class Matrix:
    """A matrix or vector; with `scale_inv`, in block FP8, of which the values count.

    A kernel may write the same values with other data and scales.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16  # of the values

    def rows(self, start: int, count: int) -> "Matrix":
        """These rows; with scales they have to begin at a block."""
        if self.scale_inv is None:
            return Matrix(self.data[start : start + count])
        if start % BLOCK:
            raise UnmappedError(f"a shard that begins at row {start}, inside a block")
        blocks = slice(start // BLOCK, -(-(start + count) // BLOCK))
        return replace(
            self, data=self.data[start : start + count], scale_inv=self.scale_inv[blocks]
        )

    def digest(self, row: int, column: int) -> int:
        """Digest of the values, which are at (row, column) of a larger tensor."""
        if self.scale_inv is None:
            return tensor_digest(self.data, row, column)
        total = 0
        for start in range(0, len(self.data), _DEQUANTIZED_ROWS):
            part = self.rows(start, _DEQUANTIZED_ROWS)
            assert part.scale_inv is not None
            values = dequantize_weight(part.data, part.scale_inv, self.dtype)
            total += tensor_digest(values, row + start, column)
        return total % MODULUS


@dataclass(frozen=True)
class LoadedSlice:
    """A part of a worker's weights, and where it is in the checkpoint's tensor.

    copy: slices of one tensor with the same `copy` are disjoint and make up the whole tensor.
    """

    name: str
    copy: str
    matrix: Matrix
    row: int = 0
    column: int = 0


def digest_model(model: torch.nn.Module, names: frozenset[str]) -> EngineDigests:
    """Digest every parameter of this worker's part of the model.

    Args:
        model: vLLM's model.
        names: the checkpoint's tensors that were sent; other results count as unmapped.
    """
    result = EngineDigests()
    first_paths: dict[int, str] = {}
    for path, module in model.named_modules():
        parameters = [name for name, _ in module.named_parameters(recurse=False)]
        if not parameters:
            continue
        first_path = first_paths.setdefault(_identity(module), path)
        try:
            digests = [
                (part.name, part.copy, part.matrix.digest(part.row, part.column))
                for part in _slices_of(path, first_path, module)
            ]
        except UnmappedError:
            result.unmapped.update(f"{path}.{name}" for name in parameters)
            continue
        for name, copy, digest in digests:
            if name in names:
                result.add(name, copy, digest)
            else:
                result.unmapped.add(name)
    return result


def _identity(module: Any) -> int:
    """Of the weight: a tied head has the embedding's, and a checkpoint holds it once."""
    return id(module._parameters.get("weight", module))


def _slices_of(path: str, first_path: str, module: Any) -> Iterator[LoadedSlice]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if hasattr(module, "w13_weight") and hasattr(module, "w2_weight"):
        return _expert_slices(path, module)
    if isinstance(module, VocabParallelEmbedding):
        return _vocab_slices(path, first_path, module)
    if isinstance(module, LinearBase):
        return _linear_slices(path, module)
    return _plain_slices(path, module)


def _plain_slices(path: str, module: Any) -> Iterator[LoadedSlice]:
    """Norms and the like: every worker holds all of it."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 2 or not parameter.is_floating_point():
            raise UnmappedError(path)
        yield LoadedSlice(f"{path}.{name}", _copy(path, _tensor_rank()), Matrix(parameter))


def _vocab_slices(path: str, first_path: str, module: Any) -> Iterator[LoadedSlice]:
    """Rows of the vocabulary, without the padding; and what a head computes with."""
    if getattr(module, "bias", None) is not None:
        raise UnmappedError(path)
    shard = module.shard_indices
    start, count = shard.org_vocab_start_index, shard.num_org_elements
    name = f"{first_path}.weight"
    yield LoadedSlice(name, _copy(path, 0), Matrix(module.weight).rows(0, count), start)
    if hasattr(module, "cpu_linear") and _is_head(module):
        computed = Matrix(_read_cpu_linear(module, module.embedding_dim)).rows(0, count)
        yield LoadedSlice(name, _copy(f"{path} kernel", 0), computed, start)


def _linear_slices(path: str, module: Any) -> Iterator[LoadedSlice]:
    from vllm.model_executor.layers.linear import (
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )

    parts = {"weight": _linear_weight(path, module)}
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias":
            # The CPU kernels widen the bias; back in the model's type it is what was sent.
            parts[name] = Matrix(parameter.to(module.params_dtype))
        elif name not in ("weight", "weight_scale_inv"):
            raise UnmappedError(f"{path}.{name}")
    rank = 0 if module.disable_tp else module.tp_rank
    for name, matrix in parts.items():
        if isinstance(module, ReplicatedLinear):
            if path.rpartition(".")[2] in _SHARDS:
                raise UnmappedError(path)
            yield LoadedSlice(f"{path}.{name}", _copy(path, module.tp_rank), matrix)
        elif isinstance(module, RowParallelLinear) and name == "bias":
            yield LoadedSlice(f"{path}.{name}", _copy(path, rank), matrix)
        elif isinstance(module, RowParallelLinear):
            column = rank * module.input_size_per_partition
            yield LoadedSlice(f"{path}.{name}", _copy(path, 0), matrix, column=column)
        elif isinstance(module, QKVParallelLinear):
            yield from _qkv_slices(path, name, module, matrix, rank)
        else:
            yield from _row_slices(path, name, module, matrix, rank)


def _qkv_slices(
    path: str, name: str, module: Any, matrix: Matrix, rank: int
) -> Iterator[LoadedSlice]:
    """q, k, v below each other; with fewer key-value heads than workers, several hold each."""
    replicas = module.num_kv_head_replicas
    stem = path.rpartition(".")[0]
    start = 0
    for shard, rows, copies in zip(
        _SHARDS["qkv_proj"],
        (
            module.num_heads * module.head_size,
            module.num_kv_heads * module.head_size,
            module.num_kv_heads * module.v_head_size,
        ),
        (1, replicas, replicas),
        strict=True,
    ):
        yield LoadedSlice(
            f"{stem}.{shard}.{name}",
            _copy(path, rank % copies),
            matrix.rows(start, rows),
            rank // copies * rows,
        )
        start += rows


def _row_slices(
    path: str, name: str, module: Any, matrix: Matrix, rank: int
) -> Iterator[LoadedSlice]:
    """Rows sharded over the workers, of one tensor or of several below each other."""
    stem, _, last = path.rpartition(".")
    shards = _SHARDS.get(last, (last,))
    if len(module.output_partition_sizes) != len(shards):
        raise UnmappedError(path)
    start = 0
    for shard, rows in zip(shards, module.output_partition_sizes, strict=True):
        part = matrix.rows(start, rows)
        yield LoadedSlice(f"{stem}.{shard}.{name}", _copy(path, 0), part, rank * rows)
        start += rows


def _expert_slices(path: str, module: Any) -> Iterator[LoadedSlice]:
    """gate above up (`w13`) and down (`w2`) of the experts that this worker has."""
    known = {f"{w}_{s}" for w in ("w13", "w2") for s in ("weight", "weight_scale_inv")}
    experts = module.expert_map_manager.get_local_expert_ids()
    w13, w2 = (_plain_experts(path, module, name) for name in ("w13", "w2"))
    others = {name for name, _ in module.named_parameters(recurse=False)} - known
    if others or not len(experts) == len(w13) == len(w2):
        raise UnmappedError(path)
    stem = path.removesuffix(".routed_experts")
    parallel = module.moe_config.moe_parallel_config
    size = module.intermediate_size_per_partition
    start = 0 if parallel.use_ep else parallel.tp_rank * size
    for expert, gate_up, down in zip(experts, w13, w2, strict=True):
        padded = len(gate_up.data) // 2
        unpadded = replace(down, data=down.data[:, :size])
        for shard, matrix, row, column in (
            ("gate_proj", gate_up.rows(0, size), start, 0),
            ("up_proj", gate_up.rows(padded, size), start, 0),
            ("down_proj", unpadded, 0, start),
        ):
            name = f"{stem}.{expert}.{shard}.weight"
            yield LoadedSlice(name, _copy(path, 0), matrix, row, column)


def _plain_experts(path: str, module: Any, name: str) -> list[Matrix]:
    """The matrix of each expert in the checkpoint's layout, whatever the backend made of it."""
    method = module.quant_method
    backend = getattr(method, "unquantized_backend", None) or getattr(method, "fp8_backend", None)
    backend_name = getattr(backend, "name", "")
    data = getattr(module, f"{name}_weight").detach()
    scale_inv = getattr(module, f"{name}_weight_scale_inv", None)
    if backend_name in _PLAIN_EXPERT_BACKENDS:
        scales = [None] * len(data) if scale_inv is None else list(scale_inv.detach())
        dtype = module.params_dtype
        return [_block_matrix(path, d, s, dtype) for d, s in zip(data, scales, strict=True)]
    kernel: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if backend_name == "CPU" and not getattr(kernel, "_use_zentorch", True):
        count, rows, columns = data.shape
        order = _packed_order(kernel.isa, rows, columns, data.dtype)
        plain = torch.empty_like(data)
        plain.view(count, -1)[:, order] = data.view(count, -1)
        return [Matrix(matrix) for matrix in plain]
    raise UnmappedError(path)


@functools.lru_cache(maxsize=16)
def _packed_order(isa: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """For each place in vLLM's packed layout, the element's place before: positions, packed.

    They travel a byte at a time, since every type holds 0 ... 255 exactly.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    places = torch.arange(rows * columns).view(1, rows, columns)
    order = torch.zeros(rows * columns, dtype=torch.int64)
    for shift in range(0, 32, 8):
        byte = ((places >> shift) & 0xFF).to(dtype)
        order |= cpu_prepack_moe_weight(byte, isa).view(-1).long() << shift
    return order


def _linear_weight(path: str, module: Any) -> Matrix:
    """The weight [rows, columns] that a linear layer computes with."""
    weight = module.weight.detach()
    rows = sum(getattr(module, "output_partition_sizes", None) or [module.output_size])
    columns = getattr(module, "input_size_per_partition", module.input_size)
    if hasattr(module, "cpu_linear"):
        return Matrix(_read_cpu_linear(module, columns))
    if tuple(weight.shape) != (rows, columns):
        raise UnmappedError(path)
    return _block_matrix(
        path, weight, getattr(module, "weight_scale_inv", None), module.params_dtype
    )


def _block_matrix(
    path: str, data: torch.Tensor, scale_inv: torch.Tensor | None, dtype: torch.dtype
) -> Matrix:
    """A plain matrix, or FP8 with a float32 scale per block; kernels have other layouts, too."""
    if data.dtype != torch.float8_e4m3fn and scale_inv is None:
        return Matrix(data)
    if (
        data.dtype != torch.float8_e4m3fn
        or scale_inv is None
        or scale_inv.dtype != torch.float32
        or tuple(scale_inv.shape) != scale_shape(data.shape)
    ):
        raise UnmappedError(path)
    return Matrix(data, scale_inv.detach(), dtype)


def _read_cpu_linear(module: Any, columns: int) -> torch.Tensor:
    """Read the packed weight of a CPU layer by sending unit vectors through its kernel.

    Each output is one weight times 1 plus zeros, so nothing is rounded.
    """
    dtype = module.params_dtype
    transposed: torch.Tensor | None = None
    for start in range(0, columns, _PROBE_ROWS):
        count = min(_PROBE_ROWS, columns - start)
        units = torch.zeros(count, columns, dtype=dtype)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        outputs = module.cpu_linear(units, module.weight, None)
        if transposed is None:
            transposed = outputs.new_empty(columns, outputs.shape[1])
        transposed[start : start + count] = outputs
    assert transposed is not None
    return transposed.t()


def _is_head(module: Any) -> bool:
    """Whether logits are computed with this embedding: a head of its own, or a tied one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


def _tensor_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _copy(path: str, replica: int) -> str:
    from vllm.distributed import get_pp_group

    return f"{path}/{get_pp_group().rank_in_group}/{replica}"
