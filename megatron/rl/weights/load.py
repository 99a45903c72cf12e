# SPDX-License-Identifier: Apache-2.0
"""Fill a Megatron model from a Hugging Face checkpoint folder."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.model.build import padded_vocab_size
from megatron.rl.weights.hf_files import HFTensors
from megatron.rl.weights.names import Location, expected_hf_names, hf_to_shard, locate


def local_parameters(
    chunks: Sequence[GPTModel], architecture: Architecture
) -> list[tuple[torch.nn.Parameter, Location]]:
    """Return this rank's parameters with the Hugging Face tensors that they belong to."""
    experts = architecture.num_experts // chunks[0].config.expert_model_parallel_size
    expert_offset = parallel_state.get_expert_model_parallel_rank() * experts
    return [
        (
            parameter,
            locate(
                name,
                # Each chunk numbers its layers from 0.
                layer_offset=get_transformer_layer_offset(chunk.config, chunk.vp_stage),
                expert_offset=expert_offset,
                tied=architecture.tied_embeddings,
            ),
        )
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    ]


def load_hf_checkpoint(
    chunks: Sequence[GPTModel], architecture: Architecture, folder: str | Path
) -> None:
    """Copy the weights of a checkpoint into the model's chunks, each rank its own shards.

    Values are cast to the parameters' dtype. Padding rows of the vocabulary become zero.

    Raises:
        UserError: tensors are missing, unknown or of another shape than the config says.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    with HFTensors(folder) as tensors:
        _check_names(tensors.names(), architecture, folder)
        for parameter, location in local_parameters(chunks, architecture):
            expert = location.rule.is_expert
            shard = hf_to_shard(
                location.rule,
                [partial(tensors.read, name) for name in location.hf_names],
                architecture,
                rank=0 if expert else tp_rank,
                world_size=1 if expert else tp_size,
                padded_rows=padded_vocab_size(architecture.vocab_size, tp_size),
            )
            if shard.shape != parameter.shape:
                raise UserError(
                    f"model.path: {', '.join(location.hf_names)} in {folder} give a shard of shape "
                    f"{tuple(shard.shape)}, config.json asks for {tuple(parameter.shape)}"
                )
            with torch.no_grad():
                parameter.copy_(shard)


def _check_names(found: set[str], architecture: Architecture, folder: str | Path) -> None:
    expected = set(expected_hf_names(architecture))
    if architecture.tied_embeddings:
        found = found - {"lm_head.weight"}  # some writers store the tied head a second time
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        raise UserError(
            f"model.path: the weights in {folder} do not match its config.json: "
            f"{len(missing)} missing (first: {missing[:1]}), {len(unknown)} unknown "
            f"(first: {unknown[:1]})"
        )
