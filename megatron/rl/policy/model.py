# SPDX-License-Identifier: Apache-2.0
"""The trained policy: Megatron model, DistributedDataParallel, optimizer and schedule together."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron.rl.batch import MicroBatch
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.model.build import BuildOptions, build_model, parameter_naming
from megatron.rl.model.fp8 import distributed_fields
from megatron.rl.parallel import ParallelConfig
from megatron.rl.policy.head import PolicyHead, TokenRecord
from megatron.rl.policy.step import forward_backward
from megatron.rl.policy.trained_model import TrainedModel, training_device
from megatron.rl.weights.load import load_hf_checkpoint
from megatron.rl.weights.plan import plan_weights

# The loss contract and the trainer's own settings decide these; a user's value would be overruled.
RESERVED_DDP_FIELDS = frozenset({"average_in_collective", "grad_reduce_in_fp32"})
RESERVED_OPTIMIZER_FIELDS = frozenset(
    {"lr", "min_lr", "weight_decay", "clip_grad", "bf16", "fp16", "params_dtype"}
)


@dataclass(frozen=True)
class OptimizerSettings:
    """What the optimizer and its schedule need; ``total_steps`` is the run's optimizer steps."""

    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    total_steps: int
    schedule: str
    weight_decay: float
    clip_grad: float
    ddp: dict[str, Any]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did on this rank; a record and a loss a micro-batch."""

    grad_norm: float
    learning_rate: float
    records: list[TokenRecord]
    losses: list[Tensor]


class Policy(TrainedModel):
    """This rank's part of the policy, with the operations that the trainer needs.

    All of them are collective: every rank calls them in the same order.
    """

    def __init__(
        self,
        architecture: Architecture,
        layout: ParallelConfig,
        build: BuildOptions,
        settings: OptimizerSettings,
        head: PolicyHead,
        model_path: str,
    ) -> None:
        device = training_device()
        chunks = [chunk.to(device) for chunk in build_model(architecture, layout, build)]
        plan = plan_weights(architecture, layout, parameter_naming())
        load_hf_checkpoint(chunks, plan, model_path, rank=torch.distributed.get_rank())
        ddp_config = DistributedDataParallelConfig(
            **_checked(DistributedDataParallelConfig, "megatron.ddp", settings.ddp,
                       RESERVED_DDP_FIELDS, {"use_distributed_optimizer": True}),
            **distributed_fields(build.fp8),
            grad_reduce_in_fp32=True,
            average_in_collective=False,
        )  # fmt: skip
        wrapped = [
            # As megatron/training/training.py does: buckets only for the chunk whose backward
            # pass comes last.
            DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        optimizer = get_megatron_optimizer(_optimizer_config(settings, build.dtype), wrapped)
        super().__init__(architecture, layout, head, wrapped, optimizer)
        self.scheduler = _scheduler(optimizer, settings)
        config = chunks[0].config  # the chunks share it
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        if ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Take one optimizer step on a minibatch.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        self.restore()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        records = forward_backward(self.chunks, self.head, micro_batches, losses=losses)
        self._require_finite_gradients()
        self.scheduler.step(increment=1)  # before the step: a warm-up never starts at lr 0
        _, grad_norm, _ = self.optimizer.step()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        return StepResult(float(grad_norm), learning_rate, records, losses)

    def pass_over_steps(self, count: int) -> None:
        """Move the learning rate on as if so many steps had been taken."""
        if count:
            self.scheduler.step(increment=count)

    @property
    def schedule_steps(self) -> int:
        """Steps that the schedule of learning rate and weight decay has taken."""
        steps: int = self.scheduler.num_steps
        return steps

    def resume_schedule(self, steps: int) -> None:
        """Continue the schedule behind so many steps, as this run's settings define it."""
        self.scheduler.num_steps = 0
        self.scheduler.step(increment=steps)

    def _require_finite_gradients(self) -> None:
        buffers = [
            buffer
            for chunk in self.chunks
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ]
        finite = torch.stack([buffer.grad_data.sum().isfinite() for buffer in buffers]).all()
        flag = finite.to(torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        if not flag:
            raise FloatingPointError(
                "the gradient is not finite, this step was not taken: the log-prob of a kept token "
                "or its advantage is NaN or infinite. Look at the divergence and mismatch metrics "
                "of the last steps in metrics.jsonl"
            )


def is_last_stage() -> bool:
    """Return whether this rank's stage computes the loss."""
    return parallel_state.is_pipeline_last_stage()


def _optimizer_config(settings: OptimizerSettings, dtype: torch.dtype) -> OptimizerConfig:
    extra = _checked(
        OptimizerConfig,
        "megatron.optimizer",
        settings.optimizer,
        RESERVED_OPTIMIZER_FIELDS,
        {"use_distributed_optimizer": settings.ddp.get("use_distributed_optimizer", True)},
    )
    return OptimizerConfig(
        lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        **extra,
    )


def _checked(
    schema: type,
    section: str,
    values: dict[str, Any],
    reserved: frozenset[str],
    defaults: dict[str, Any],
) -> dict[str, Any]:
    """Check the names of a user's extra fields for one of Megatron's config classes."""
    known = {f.name for f in fields(schema)}
    for name in values:
        if name not in known:
            raise UserError(f"{section}.{name}: {schema.__name__} has no such field")
        if name in reserved:
            raise UserError(f"{section}.{name} is set by the trainer; remove it")
    return defaults | values


def _scheduler(optimizer: Any, settings: OptimizerSettings) -> OptimizerParamScheduler:
    decay_steps = max(settings.total_steps, settings.warmup_steps + 1, 1)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )
    return scheduler
