# SPDX-License-Identifier: Apache-2.0
"""A policy that trains for three steps and, if asked to, gives up its memory after each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.parallel.policy_case import build_policy, make_sequences, packed

if TYPE_CHECKING:
    from megatron.rl.batch import MicroBatch
    from megatron.rl.policy.model import Policy

STEPS = 3


@dataclass(frozen=True)
class Run:
    """What the steps of one policy did, and what was seen while its memory was given up.

    gradient_bytes   of the buffers: at first, released, restored, released twice more
    host_bytes       of the optimizer's parameters and state: the same without the first
    views            optimizer parameters that lie in the weights' memory, of all `parameters`
    """

    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    weights_meanwhile: dict[str, torch.Tensor]
    gradient_bytes: list[int]
    host_bytes: list[int]
    views: int
    parameters: int


def train(path: str, layout: dict[str, int], dtype: torch.dtype, *, offload: bool) -> Run:
    """Take the steps in a process group that exists, on the device that the backend says."""
    from megatron.rl.policy.offload import weight_views

    policy, batches = _make_policy(path, layout, dtype)
    buffers = [b for chunk in policy.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]

    def gradient_bytes() -> int:
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in policy.hf_tensors()}

    norms: list[float] = []
    meanwhile: dict[str, torch.Tensor] = {}
    gradients, host = [gradient_bytes()], []
    for step in range(STEPS):
        norms.append(policy.train_step(batches).grad_norm)
        if offload:
            policy.offload()
            policy.offload()  # as good as once
            gradients.append(gradient_bytes())
            host.append(_host_bytes(policy))
            meanwhile = weights()  # what the engine is updated from stays
            if step == 0:  # the third step restores by itself
                policy.restore()
                gradients.append(gradient_bytes())
                host.append(_host_bytes(policy))
    return Run(
        norms,
        weights(),
        meanwhile,
        gradients,
        host,
        len(list(weight_views(policy.chunks, policy.optimizer))),
        len(_optimizer_parameters(policy)),
    )


def _make_policy(
    path: str, layout: dict[str, int], dtype: torch.dtype
) -> tuple[Policy, list[MicroBatch]]:

    from megatron.rl.parallel import ParallelConfig

    parallel = ParallelConfig(**layout)
    policy = build_policy(
        path,
        layout,
        dtype=dtype,
        learning_rate=1e-2,
        total_steps=STEPS,
        weight_decay=0.1,
        clip_grad=0.5,
        ddp={"overlap_grad_reduce": True},
    )
    sequences = make_sequences(policy.architecture.vocab_size)
    return policy, packed(sequences, parallel)


def _optimizers(policy: Policy) -> list[Any]:
    chain = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    return [part.optimizer for part in chain]


def _optimizer_parameters(policy: Policy) -> list[torch.Tensor]:
    groups = [group for optimizer in _optimizers(policy) for group in optimizer.param_groups]
    return [param for group in groups for param in group["params"]]


def _host_bytes(policy: Policy) -> int:
    """Of the optimizer's parameters and state, what lies in host memory."""
    states = [s for optimizer in _optimizers(policy) for s in optimizer.state.values()]
    tensors = _optimizer_parameters(policy) + [v for state in states for v in state.values()]
    held = [t for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
    return sum(t.numel() * t.element_size() for t in held)
