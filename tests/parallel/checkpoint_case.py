# SPDX-License-Identifier: Apache-2.0
"""Policies that have trained, their state through Megatron's own gathering, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.parallel.policy_case import build_policy, make_sequences, packed

STEPS_BEFORE = 3
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "min_learning_rate": 1e-5,
    "warmup_steps": 2,
    "total_steps": 10,
    "schedule": "cosine",
    "weight_decay": 0.1,
}


def run_state(step: int = STEPS_BEFORE, **fields: Any):  # type: ignore[no-untyped-def]
    from megatron.rl.checkpoint.run_state import RunState

    values: dict[str, Any] = {"rollout": 1, "policy_version": 1, "config_digest": "d"}
    return RunState(step=step, **(values | fields))


def policy_in(path: str, layout: dict[str, int], dtype: str, **settings: Any):  # type: ignore[no-untyped-def]
    return build_policy(path, layout, dtype=getattr(torch, dtype), **(SETTINGS | settings))


def train(policy, steps: int, first: int = 0) -> list[tuple[float, float, float]]:  # type: ignore[no-untyped-def]
    """Take steps, each on sequences of its own seed; return (lr, weight decay, gradient norm)."""

    layout, taken = policy.layout, []
    for seed in range(first, first + steps):
        sequences = make_sequences(policy.architecture.vocab_size, seed)
        result = policy.train_step(packed(sequences, layout))
        decay = max(group["weight_decay"] for group in policy.optimizer.param_groups)
        taken.append((result.learning_rate, decay, result.grad_norm))
    return taken


def global_state(policy) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """Weights and optimizer state as whole tensors, on rank 0.

    Megatron gathers and places them: its ``fully_reshardable`` state dict, of which only the main
    replicas are taken. Padding rows of the vocabulary are cut off.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensorFactory,
        apply_factories,
        is_main_replica,
    )
    from megatron.core.utils import unwrap_model

    metadata = {
        "singleton_local_shards": True,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    for _ in policy.hf_tensors():  # brings the last step's weights to all ranks
        pass
    chunks = unwrap_model(policy.chunks)
    model = {str(n): chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)}
    optimizer = policy.optimizer.sharded_state_dict(model, metadata=metadata)
    everything = {"model": model, "optimizer": optimizer}
    apply_factories(everything)
    own = []
    for shard in nested_values(everything):
        assert not isinstance(shard, ShardedTensorFactory)
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            value = shard.data.detach().reshape(shard.local_shape).clone()
            own.append((shard.key, shard.global_shape, shard.global_offset, value))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    if dist.get_rank() != 0:
        return {}
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offset, value in (shard for of_rank in gathered for shard in of_rank):
        target = whole.setdefault(key, torch.full(shape, torch.nan, dtype=value.dtype))
        target[tuple(slice(o, o + n) for o, n in zip(offset, value.shape, strict=True))] = value
    vocab_size = policy.architecture.vocab_size
    for key, tensor in whole.items():
        assert not tensor.isnan().any(), key
        if "word_embeddings" in key or "output_layer" in key:
            whole[key] = tensor[:vocab_size].clone()
    return whole


def writer_for(policy, folder: str, **settings: Any):  # type: ignore[no-untyped-def]
    from megatron.rl.checkpoint.settings import CheckpointConfig
    from megatron.rl.checkpoint.writer import CheckpointWriter

    values: dict[str, Any] = {"async_save": False, "min_free_gib": 0.0}
    return CheckpointWriter(CheckpointConfig(**(values | settings)), Path(folder), policy)
