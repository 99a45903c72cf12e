# SPDX-License-Identifier: Apache-2.0
"""One clipped step with the distributed optimizer, in several layouts, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.checkpoints import QWEN3_MOE, random_tensors, write_checkpoint
from tests.parallel.policy_case import (
    LOSS,
    build_policy,
    float64_oracle,
    make_sequences,
    packed,
)
from tests.parallel.spawn import run_ranks

# Adam's first step is lr * g / (|g| + eps). With an eps far above every gradient it is linear in g,
# and does not blow up the rounding of gradients near zero.
ADAM_EPS = 1e6
LEARNING_RATE = 10.0 * ADAM_EPS
CLIP_GRAD = 0.5
LAYOUTS = [
    {"data": 2, "expert": 2},
    {"tensor": 2, "expert": 2},
    {"pipeline": 2},
    {"context": 2, "expert": 2},
    {"pipeline": 2, "virtual": 2},
]
# Layers for the virtual stages; all layouts share one oracle.
MODEL = QWEN3_MOE | {"num_hidden_layers": 4}


def take_steps(
    rank: int, world_size: int, path: str, layouts: list[dict[str, int]]
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Take one step in each layout; rank 0 returns gradient norms and new weights."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.core import parallel_state

    results = []
    for layout in layouts:
        results.append(_take_step(path, layout))
        parallel_state.destroy_model_parallel()
    return results


def _take_step(path: str, layout: dict[str, int]) -> tuple[float, dict[str, torch.Tensor]]:

    from megatron.rl.parallel import ParallelConfig

    parallel = ParallelConfig(**layout)
    policy = build_policy(
        path,
        layout,
        learning_rate=LEARNING_RATE,
        clip_grad=CLIP_GRAD,
        ddp={
            "overlap_grad_reduce": layout.keys() & {"data", "virtual"} != set(),
            "overlap_param_gather": "data" in layout,
        },
        optimizer={"adam_eps": ADAM_EPS},
    )
    sequences = make_sequences(policy.architecture.vocab_size)
    result = policy.train_step(packed(sequences, parallel))
    assert result.learning_rate == LEARNING_RATE
    return result.grad_norm, {name: tensor.clone() for name, tensor in policy.hf_tensors()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "moe", MODEL))


def test_clipped_step_of_the_distributed_optimizer(checkpoint: str) -> None:
    oracle = float64_oracle(checkpoint, LOSS).gradients
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in oracle.values()))
    assert norm > CLIP_GRAD, "clipping must do something"
    factor = LEARNING_RATE / ADAM_EPS * CLIP_GRAD / (norm + 1e-6)
    before = random_tensors(MODEL, seed=0)
    outcomes: list[Any] = run_ranks(take_steps, 2, checkpoint, LAYOUTS)[0]
    for layout, (grad_norm, after) in zip(LAYOUTS, outcomes, strict=True):
        assert grad_norm == pytest.approx(norm, rel=1e-5), layout
        for name, gradient in oracle.items():
            step = before[name].double() - after[name].double()
            # A float32 weight near 1 resolves a step to 6e-8.
            error = (step - factor * gradient).norm()
            assert error <= 1e-5 * factor * gradient.norm() + 1.2e-7 * math.sqrt(step.numel()), (
                f"{layout} {name}"
            )
