# SPDX-License-Identifier: Apache-2.0
"""Gather a Megatron model, sharded in any layout, into whole Hugging Face tensors on one rank."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron.rl.model.architecture import Architecture
from megatron.rl.weights.load import local_parameters
from megatron.rl.weights.names import Join, Location, expected_hf_names, shards_to_hf

BUCKET_BYTES = 256 * 1024**2

# What one rank announces before it sends: names and shapes, in order.
_Manifest = list[tuple[str, tuple[int, ...]]]


def gather_hf_tensors(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    *,
    destination: int = 0,
    value: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor of the model once, on rank ``destination``.

    Collective: every rank iterates to the end; other ranks yield nothing. Tensors are joined over
    tensor-parallel ranks first, then sent in buckets of about 256 MB by one rank of each pipeline
    stage (and of each expert-parallel rank for experts).

    Args:
        chunks: this rank's part of the model.
        value: what to gather of a parameter, of its shape: by default its weights.

    Raises:
        RuntimeError: on the destination, when the ranks together do not send exactly the tensors
            of the architecture.
    """
    rank = dist.get_rank()
    tensors = _tensors_to_send(chunks, architecture, value)
    manifest: _Manifest = [(name, tuple(tensor.shape)) for name, tensor in tensors]
    manifests: list[_Manifest] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(manifests, manifest)
    if rank == destination:
        _check_complete(manifests, architecture)
    like = value(next(chunks[0].parameters()))
    for source, theirs in enumerate(manifests):
        if source == destination:
            if rank == destination:
                yield from tensors
            continue
        for start, stop in _buckets(theirs, like.element_size()):
            if rank == source:
                dist.send(torch.cat([t.reshape(-1) for _, t in tensors[start:stop]]), destination)
            elif rank == destination:
                numels = [torch.Size(shape).numel() for _, shape in theirs[start:stop]]
                flat = like.new_empty(sum(numels))
                dist.recv(flat, source)
                for (name, shape), part in zip(theirs[start:stop], flat.split(numels), strict=True):
                    yield name, part.view(shape)


def _tensors_to_send(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    value: Callable[[torch.nn.Parameter], Tensor],
) -> list[tuple[str, Tensor]]:
    """Join this rank's parameters over TP; keep those that this rank is the one to send."""
    first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    sends_dense = first_replica and parallel_state.get_tensor_model_parallel_rank() == 0
    sends_experts = parallel_state.get_expert_data_parallel_rank() == 0
    tensors: list[tuple[str, Tensor]] = []
    for parameter, location in local_parameters(chunks, architecture):
        expert = location.rule.is_expert
        whole = expert or location.rule.join is Join.WHOLE
        shards = [value(parameter)] if whole else _tensor_parallel_shards(value(parameter))
        if not (sends_experts if expert else sends_dense):
            continue
        if _is_shared_head(location, architecture):
            continue
        joined = shards_to_hf(location.rule, shards, architecture)
        tensors += zip(location.hf_names, joined, strict=True)
    return tensors


def _is_shared_head(location: Location, architecture: Architecture) -> bool:
    # With tied embeddings the last pipeline stage holds a copy of the embedding as its head.
    return architecture.tied_embeddings and location.parameter == "output_layer.weight"


def _tensor_parallel_shards(shard: Tensor) -> list[Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _buckets(manifest: _Manifest, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive tensors that fit a bucket together."""
    start, size = 0, 0
    for i, (_, shape) in enumerate(manifest):
        nbytes = torch.Size(shape).numel() * itemsize
        if i > start and size + nbytes > BUCKET_BYTES:
            yield start, i
            start, size = i, 0
        size += nbytes
    if start < len(manifest):
        yield start, len(manifest)


def _check_complete(manifests: list[_Manifest], architecture: Architecture) -> None:
    sent = [name for manifest in manifests for name, _ in manifest]
    expected = set(expected_hf_names(architecture))
    twice = len(sent) - len(set(sent))
    missing, unknown = sorted(expected - set(sent)), sorted(set(sent) - expected)
    if twice or missing or unknown:
        raise RuntimeError(
            f"the gathered weights do not make up the model: {twice} sent twice, "
            f"{len(missing)} missing ({missing[:1]}), {len(unknown)} unknown ({unknown[:1]})"
        )
