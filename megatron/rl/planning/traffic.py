# SPDX-License-Identifier: Apache-2.0
"""Tokens of a rollout batch, and the bytes that they and the weights move."""

from dataclasses import dataclass

from megatron.rl.config import Config
from megatron.rl.model.architecture import Architecture
from megatron.rl.planning.engine_memory import checkpoint_bytes
from megatron.rl.planning.parameters import rank_parameters
from megatron.rl.planning.precision import FLOAT32_BYTES, training_precision
from megatron.rl.rollout.topk_columns import TopKColumns

# Beside its top-K entries a response token has an id, a log-prob and a policy version.
_TOKEN_BYTES = 12
# All-gathers and reduce-scatters of a layer's tokens under sequence parallelism: two of each in the
# forward pass, as many in the backward pass, where both gathered inputs are gathered once more.
_TENSOR_COLLECTIVES = 10
# Dispatch and combine, forward and backward.
_EXPERT_COLLECTIVES = 4


@dataclass(frozen=True)
class Traffic:
    """Of one rollout batch; bytes of a rank are of the busiest kind of rank, in one direction.

    Attributes:
        sequences: sampled, and trained on ``train.epochs`` times.
        response_tokens, tokens: expected; ``tokens`` with the prompts.
        steps: optimizer steps.
        rollout_bytes: sampled tokens with their top-K log-probs, over the whole cluster.
        weight_bytes: one set of weights as an engine gets it.
        tensor_bytes: of a rank in tensor-parallel collectives.
        expert_bytes: of a rank to experts elsewhere and back.
        gradient_bytes: of a rank: gradients reduce-scattered, weights gathered.
    """

    sequences: int
    response_tokens: int
    tokens: int
    steps: int
    rollout_bytes: int
    weight_bytes: int
    tensor_bytes: int
    expert_bytes: int
    gradient_bytes: int


def plan_traffic(
    config: Config, model: Architecture, response_tokens: int, prompt_tokens: int
) -> Traffic:
    """Count what one rollout batch moves.

    Args:
        response_tokens, prompt_tokens: expected mean lengths.
    """
    layout, train, rollout = config.parallel, config.train, config.rollout
    width = training_precision(config).weight_bytes
    sequences = rollout.prompts * rollout.group_size
    responses = sequences * response_tokens
    tokens = responses + sequences * prompt_tokens
    steps = train.epochs * -(-rollout.prompts // train.minibatch_prompts)
    columns = TopKColumns.empty(model.vocab_size, rollout.top_logprobs, rollout.topk_precision)
    row = sum(array.shape[1] * array.itemsize for array in columns.arrays().values())
    # Layers and tokens of one rank, all epochs.
    layer_tokens = train.epochs * tokens // (layout.data * layout.context)
    layer_tokens *= -(-model.num_layers // layout.pipeline)
    hidden = layer_tokens * model.hidden_size * width
    tensor = _TENSOR_COLLECTIVES * hidden * (layout.tensor - 1) // layout.tensor
    expert = 0
    if model.is_moe:
        copies = _EXPERT_COLLECTIVES * hidden * model.experts_per_token // layout.tensor
        expert = copies * (layout.expert - 1) // layout.expert
    return Traffic(
        sequences=sequences,
        response_tokens=responses,
        tokens=tokens,
        steps=steps,
        rollout_bytes=responses * (row + _TOKEN_BYTES),
        weight_bytes=checkpoint_bytes(config, model),
        tensor_bytes=tensor,
        expert_bytes=expert,
        gradient_bytes=_gradient_bytes(config, model, width) * steps,
    )


def _gradient_bytes(config: Config, model: Architecture, width: int) -> int:
    """Of a rank of the first stage in one step."""
    layout = config.parallel
    parameters = rank_parameters(model, layout, 0)
    total = 0.0
    for count, replicas in (
        (parameters.dense, layout.data * layout.context),
        (parameters.expert, layout.stage_size // layout.expert),
    ):
        total += count * (FLOAT32_BYTES + width) * (replicas - 1) / replicas
    return int(total)
