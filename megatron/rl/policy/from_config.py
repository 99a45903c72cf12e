# SPDX-License-Identifier: Apache-2.0
"""The policy's head and optimizer that a run's config asks for."""

import torch

from megatron.rl.config import Config
from megatron.rl.policy.head import FusedHead, PolicyHead, ReferenceHead
from megatron.rl.policy.model import OptimizerSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def policy_head(config: Config, vocab_size: int) -> PolicyHead:
    """Return the head that computes the loss of ``config.loss``."""
    if config.policy.head == "fused":
        return FusedHead(config.loss, vocab_size, config.rollout.temperature)
    logits_dtype = DTYPES[config.policy.logits_dtype]
    return ReferenceHead(config.loss, vocab_size, config.rollout.temperature, logits_dtype)


def steps_per_batch(config: Config) -> int:
    """Optimizer steps on a whole rollout batch; a smaller one of dynamic sampling takes fewer."""
    return config.train.epochs * -(-config.rollout.prompts // config.train.minibatch_prompts)


def optimizer_settings(config: Config) -> OptimizerSettings:
    """Return the settings of the optimizer and of its schedule over the whole run."""
    train = config.train
    return OptimizerSettings(
        learning_rate=train.learning_rate,
        min_learning_rate=train.min_learning_rate,
        warmup_steps=train.warmup_steps,
        total_steps=train.rollouts * steps_per_batch(config),
        schedule=train.schedule,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
        ddp=config.megatron.ddp,
        optimizer=config.megatron.optimizer,
    )
