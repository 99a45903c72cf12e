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
            value = _high_precision(parameter)
            if held.parameter.padding:
                value[-held.parameter.padding :].zero_()
            for name, piece in held.pieces:
                source = piece.source.index(value.dim())
                value[source].copy_(tensors.read_part(name, piece.target))
            if value is not parameter:
                parameter.copy_(value)


def _high_precision(parameter: torch.Tensor) -> torch.Tensor:
    """Return where the values of a parameter are written: itself, unless it is kept in FP8.

    Transformer Engine keeps the value that an FP8 parameter was made from until the optimizer takes
    its float32 masters from it. Written there, the masters are the checkpoint's values; taken from
    the quantised parameter, they would have lost bits.
    """
    kept = getattr(parameter, "get_high_precision_init_val", None)
    return parameter if kept is None else kept()
