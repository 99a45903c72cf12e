# SPDX-License-Identifier: Apache-2.0
"""Megatron's own loop on CPU takes the optimizer steps that this project's policy takes."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import QWEN3_MOE, random_tensors, write_checkpoint
from tests.megatron_flags import layout_flags, model_flags
from tests.parallel.policy_case import LOSS, TEMPERATURE, build_policy, make_sequences
from tests.parallel.spawn import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl" / "train_rl.py"
STEPS, LEARNING_RATE, WEIGHT_DECAY, CLIP_GRAD = 3, 1e-3, 0.1, 0.5
MICRO_BATCHES, SEQUENCES_EACH = 4, 2  # of the eight sequences of a minibatch, at one replica
LAYOUTS = [
    {"tensor": 2, "expert": 2},
    pytest.param({"data": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "virtual": 2}, marks=pytest.mark.slow),
]
# Layers for the virtual stages.
MODEL = QWEN3_MOE | {"num_hidden_layers": 4}


def arguments(path: str, layout: dict[str, int]) -> list[str]:
    """What a Megatron user types for this model, this layout and this loss."""
    from megatron.rl.model.architecture import read_architecture

    model = model_flags(read_architecture(path), seq_length=64)
    run = (
        f"--pdm-device cpu --pdm-model-path {path} --pdm-task-name reasoning_gym/spell_backward "
        "--perform-rl-step --grpo-prompts-per-step 4 --grpo-group-size 2 --grpo-iterations 1 "
        f"--micro-batch-size {SEQUENCES_EACH} --global-batch-size 8 --train-iters {STEPS} "
        f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} "
        f"--clip-grad {CLIP_GRAD} --rl-default-temperature {TEMPERATURE} "
        f"--pdm-direction {LOSS.direction} --pdm-threshold {LOSS.threshold}"
    )
    return [*model, *layout_flags(layout), *run.split()]


def micro_batches(step: int, layout: dict[str, int]) -> list[Any]:
    """The step's minibatch, this rank's micro-batches."""
    from megatron.core import parallel_state

    from megatron.rl.batch import MinibatchSize, pack
    from megatron.rl.megatron_pretrain import plan_by_count

    sequences = make_sequences(MODEL["vocab_size"], seed=step)
    replicas = layout.get("data", 1)
    plan = plan_by_count(
        sequences.input_lengths,
        np.arange(len(sequences)),
        data_parallel=replicas,
        count=MICRO_BATCHES // replicas,
        size=SEQUENCES_EACH,
    )
    return [
        pack(
            sequences,
            members,
            minibatch=MinibatchSize.of(sequences.response_lengths),
            loss=LOSS,
            pad_multiple=layout.get("tensor", 1),
            device=torch.device("cpu"),
        )
        for members in plan[parallel_state.get_data_parallel_rank()]
    ]


def with_policy(rank: int, world_size: int, path: str, layout: dict[str, int]) -> Any:
    """Weights after the steps of this project's own policy, on rank 0."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    policy = build_policy(
        path,
        layout,
        loss=LOSS,
        temperature=TEMPERATURE,
        transformer={"moe_router_dtype": "fp32"},
        learning_rate=LEARNING_RATE,
        total_steps=STEPS,
        weight_decay=WEIGHT_DECAY,
        clip_grad=CLIP_GRAD,
    )
    for step in range(STEPS):
        policy.train_step(micro_batches(step, layout))
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def with_pretrain(
    rank: int, world_size: int, path: str, layout: dict[str, int], further: tuple[str, ...] = ()
) -> Any:
    """Weights after as many iterations of the example, given the same minibatches, on rank 0."""
    from megatron.rl import cpu_training, rl_utils

    cpu_training.install()
    from megatron.core.utils import unwrap_model

    from megatron.rl.megatron_pretrain import chunk_iterators
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import parameter_naming
    from megatron.rl.parallel import ParallelConfig
    from megatron.rl.weights.gather import gather_hf_tensors
    from megatron.rl.weights.plan import plan_weights

    trained: list[Any] = []

    def iterator_of(model: Any, *others: Any, **settings: Any) -> Any:
        trained[:] = model
        return chunk_iterators(micro_batches(others[2], layout), len(model))

    rl_utils.get_grpo_data_iterator = iterator_of  # type: ignore[assignment]
    rl_utils.rl_inference_interface_shutdown = lambda: None  # type: ignore[assignment, return-value]
    rl_utils.log_rl_throughput_metrics = lambda *a: ""  # type: ignore[assignment, return-value]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    sys.argv = [str(EXAMPLE), *arguments(path, layout), *further]
    with contextlib.suppress(SystemExit):  # Megatron's way out at --exit-interval
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    plan = plan_weights(read_architecture(path), ParallelConfig(**layout), parameter_naming())
    return {name: tensor.clone() for name, tensor in gather_hf_tensors(unwrap_model(trained), plan)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout))
def test_pretrain_trains_like_the_policy(tmp_path: Path, layout: dict[str, int]) -> None:
    tensors = random_tensors(MODEL, seed=3)
    path = str(write_checkpoint(tmp_path / "moe", MODEL, seed=3))
    expected = run_ranks(with_policy, 2, path, layout)[0]
    weights = run_ranks(with_pretrain, 2, path, layout)[0]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam moves a weight by about the learning rate in a step.
        assert (tensor - tensors[name]).abs().max() > LEARNING_RATE, name
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6 * LEARNING_RATE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "format_flag", ["--ckpt-fully-parallel-save", "--dist-ckpt-optim-fully-reshardable"]
)
def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path, format_flag: str) -> None:
    layout = {"tensor": 2, "expert": 2}
    path = str(write_checkpoint(tmp_path / "moe", MODEL, seed=3))
    unbroken = run_ranks(with_pretrain, 2, path, layout)[0]
    saving = ("--save", str(tmp_path / "saved"), "--save-interval", "1", format_flag)
    stopping = (*saving, "--exit-interval", "1")
    run_ranks(with_pretrain, 2, path, layout, stopping, start_processes=True)
    resumed = run_ranks(with_pretrain, 2, path, layout, ("--load", str(tmp_path / "saved")))[0]
    for name, tensor in unbroken.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-6 * LEARNING_RATE)
