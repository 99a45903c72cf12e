# SPDX-License-Identifier: Apache-2.0
"""Bytes that the trainer takes on a rank, part by part."""

from dataclasses import dataclass
from typing import Any

from megatron.rl.config import Config
from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.planning.activations import Recompute, activation_bytes
from megatron.rl.planning.head_memory import HeadBytes, head_bytes
from megatron.rl.planning.parameters import RankParameters, rank_parameters
from megatron.rl.planning.precision import DTYPE_BYTES, FLOAT32_BYTES, training_precision

_OPTIMIZER_DTYPE_BYTES = {"fp32": 4, "torch.float32": 4, "bf16": 2, "torch.bfloat16": 2, "fp16": 2,
                          "torch.float16": 2, "fp8": 1, "torch.uint8": 1}  # fmt: skip
# A token of a packed micro-batch: id and position. A row: its numbers, the sampled token and what
# the loss reports of it; and 12 bytes for each support column.
_TOKEN_BYTES, _ROW_BYTES, _COLUMN_BYTES = 16, 130, 12


@dataclass(frozen=True)
class Workload:
    """Sizes of one optimizer step on one rank, at their largest.

    Attributes:
        tokens: input tokens of a micro-batch on this context-parallel rank.
        rows: of them, those that the head sees.
        micro_batches: of the step.
        step_tokens: input tokens of the whole step on this rank.
    """

    tokens: int
    rows: int
    micro_batches: int
    step_tokens: int

    @classmethod
    def of(cls, config: Config) -> "Workload":
        """Every sequence as long as allowed, and every micro-batch full."""
        layout, rollout = config.parallel, config.rollout
        longest = rollout.max_prompt_tokens + rollout.max_response_tokens - 1
        sequences = config.train.minibatch_prompts * rollout.group_size
        step = -(-sequences // layout.data) * longest
        whole = max(longest, config.train.micro_batch_tokens // longest * longest)
        count = -(-step // whole)
        multiple = layout.pipeline if layout.virtual else 1
        # Short sequences may fill a micro-batch to its limit, but not with more than there is.
        tokens = min(max(config.train.micro_batch_tokens, longest), step)
        tokens = -(-tokens // layout.context)
        return cls(tokens, tokens, -(-count // multiple) * multiple, -(-step // layout.context))


@dataclass(frozen=True)
class TrainingBytes:
    """Of one rank while it trains, at the moment of its peak.

    ``masters`` are of the optimizer's bytes those that exist before the first step.
    ``fp8_weights`` is what Transformer Engine keeps in FP8, in both orientations: copies of the
    weights, or with ``model.fp8_params`` the weights themselves.
    ``working`` is what backward adds to the kept activations, or the head to what it keeps,
    whichever is more; ``head`` is what the head keeps.
    """

    weights: int
    fp8_weights: int
    gradients: int
    optimizer: int
    masters: int
    activations: int
    head: int
    working: int
    batch: int

    @property
    def total(self) -> int:
        return self.weights + self.fp8_weights + self.state + self.activations + self.head + (
            self.working + self.batch
        )  # fmt: skip

    @property
    def state(self) -> int:
        """What is given up while the engine samples on the same GPU."""
        return self.gradients + self.optimizer


def training_bytes(
    config: Config, model: Architecture, stage: int, workload: Workload, imbalance: float
) -> TrainingBytes:
    """Predict the trainer's memory on each rank of a pipeline stage."""
    layout, precision = config.parallel, training_precision(config)
    parameters = rank_parameters(model, layout, stage)
    activations = activation_bytes(
        model,
        layout,
        precision,
        Recompute.of(config.megatron.transformer),
        stage=stage,
        tokens=workload.tokens,
        micro_batches=workload.micro_batches,
        imbalance=imbalance,
    )
    head = HeadBytes(0, 0)
    if stage == layout.pipeline - 1:
        head = policy_head_bytes(config, model, workload)
    support = config.rollout.top_logprobs + 1
    optimizer = optimizer_bytes(parameters, layout, precision.weight_bytes, config)
    masters, per_parameter = _bytes_a_parameter(config.megatron.optimizer, precision.weight_bytes)
    narrow = parameters.linear if precision.fp8_params else 0
    return TrainingBytes(
        weights=(parameters.total - narrow) * precision.weight_bytes,
        fp8_weights=2 * parameters.linear if precision.fp8 else 0,
        gradients=parameters.total * FLOAT32_BYTES,
        optimizer=optimizer,
        masters=int(optimizer * masters / per_parameter),
        activations=activations.kept,
        head=head.kept,
        working=max(activations.working, head.peak - head.kept),
        batch=workload.step_tokens * (_TOKEN_BYTES + _ROW_BYTES + _COLUMN_BYTES * support),
    )


def policy_head_bytes(config: Config, model: Architecture, workload: Workload) -> HeadBytes:
    """Predict what the head takes on the last stage."""
    return head_bytes(
        model,
        config.parallel,
        training_precision(config),
        kind=config.policy.head,
        tokens=workload.tokens,
        rows=workload.rows,
        support=config.rollout.top_logprobs + 1,
        scaled=config.rollout.temperature != 1.0,
        logits_bytes=DTYPE_BYTES[config.policy.logits_dtype],
    )


def optimizer_bytes(
    parameters: RankParameters, layout: ParallelConfig, weight_bytes: int, config: Config
) -> int:
    """Predict the optimizer's bytes on the GPU: two moments, and float32 masters of narrow weights.

    The distributed optimizer spreads them over the ranks that hold the same parameters: DP x CP of
    them, for experts the stage's ranks divided by EP.
    """
    settings = config.megatron.optimizer
    _, per_parameter = _bytes_a_parameter(settings, weight_bytes)
    if config.megatron.ddp.get("use_distributed_optimizer", True):
        replicas = layout.data * layout.context
        expert_replicas = layout.stage_size // layout.expert
    else:
        replicas = expert_replicas = 1
    share = parameters.dense / replicas + parameters.expert / expert_replicas
    if settings.get("optimizer_cpu_offload"):
        # OptimizerConfig's default is 0, Megatron's command line has 1.
        share *= 1.0 - float(settings.get("optimizer_offload_fraction", 0.0))
    return int(share * per_parameter)


def _bytes_a_parameter(settings: dict[str, Any], weight_bytes: int) -> tuple[int, int]:
    """Return the bytes of a master weight, and of it with both moments."""
    precise = bool(settings.get("use_precision_aware_optimizer"))

    def width(name: str) -> int:
        return _OPTIMIZER_DTYPE_BYTES[str(settings.get(name, "fp32"))] if precise else FLOAT32_BYTES

    # Float32 weights are their own masters.
    masters = width("main_params_dtype") if weight_bytes < FLOAT32_BYTES else 0
    return masters, masters + width("exp_avg_dtype") + width("exp_avg_sq_dtype")
