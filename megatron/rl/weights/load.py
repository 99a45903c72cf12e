# SPDX-License-Identifier: Apache-2.0
"""Fill a Megatron model from a Hugging Face checkpoint folder."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.rl.weights.hf_files import HFTensors
from megatron.rl.weights.plan import WeightPlan


def load_hf_checkpoint(
    chunks: Sequence[torch.nn.Module], plan: WeightPlan, folder: str | Path, *, rank: int
) -> None:
    """Copy the weights of a checkpoint into the model's chunks, each rank its own shards.

    Only the slices that the rank holds are read. Values are cast to the parameters' type. Padding
    rows of the vocabulary become zero.

    Raises:
        UserError: tensors are missing, unknown or of another shape than the config says.
        WeightPlanError: the model is not the plan's.
    """
    plan.check_against_model(chunks, rank)
    parameters = [dict(chunk.named_parameters()) for chunk in chunks]
    with HFTensors(folder) as tensors, torch.no_grad():
        plan.check_against_checkpoint(tensors.shapes(), f"model.path {folder}")
        for held in plan.held_by(rank):
            parameter = parameters[held.parameter.chunk][held.parameter.name]
            if held.parameter.padding:
                parameter[-held.parameter.padding :].zero_()
            for name, piece in held.pieces:
                source = piece.source.index(parameter.dim())
                parameter[source].copy_(tensors.read_part(name, piece.target))
