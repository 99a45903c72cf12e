# SPDX-License-Identifier: Apache-2.0
"""Megatron's own loop on the rollouts of a recorded run takes the steps that the run took."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.rl.model.architecture import read_architecture
from tests.e2e.runs import Run
from tests.e2e.test_replay import records_of, replay, weights
from tests.megatron_flags import layout_flags, model_flags
from tests.parallel.spawn import run_ranks

pytestmark = pytest.mark.engine

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl" / "train_rl.py"
SEQUENCES_A_STEP, STEPS = 8, 8
TENSOR = {"tensor": 2, "expert": 2}
DATA = {"data": 2, "expert": 2}
STABLE = (
    "learning_rate",
    "tokens",
    "ppo_kl",
    "clip_fraction",
    "entropy",
    "divergence/mean",
    "mismatch/update/kl",
)
PARTS = ("tensor", "pipeline", "data", "expert")


def run_flags(model: Path) -> list[str]:
    """The settings of ``tests/e2e/runs.py`` as Megatron's and this project's flags."""
    text = (
        f"--pdm-device cpu --pdm-model-path {model} --seed 1 "
        "--pdm-task-name tests.e2e.parity_task:ParityTask --pdm-threshold 0.01 "
        "--pdm-rollout-max-prompt-tokens 64 --pdm-rollout-max-response-tokens 12 "
        "--perform-rl-step --grpo-prompts-per-step 8 --grpo-group-size 4 --grpo-iterations 1 "
        f"--global-batch-size {SEQUENCES_A_STEP} --train-iters {STEPS} --rl-prompts-per-eval 16 "
        "--lr 1e-3 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1 --log-interval 1"
    )
    return [*model_flags(read_architecture(model), seq_length=128), *text.split()]


def pretrain(rank: int, world_size: int, flags: list[str], model: str, layout: dict[str, int]):  # type: ignore[no-untyped-def]
    """The weights that the example ends with, on rank 0."""
    from megatron.rl import cpu_training, rl_utils

    cpu_training.install()
    from megatron.core.utils import unwrap_model

    from megatron.rl.model.build import parameter_naming
    from megatron.rl.parallel import ParallelConfig
    from megatron.rl.weights.gather import gather_hf_tensors
    from megatron.rl.weights.plan import plan_weights

    trained: list[Any] = []
    own = rl_utils.get_grpo_data_iterator

    def noting(model: Any, *others: Any, **settings: Any) -> Any:
        trained[:] = model
        return own(model, *others, **settings)

    rl_utils.get_grpo_data_iterator = noting
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    sys.argv = [str(EXAMPLE), *flags]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    plan = plan_weights(read_architecture(model), ParallelConfig(**layout), parameter_naming())
    return {name: tensor.clone() for name, tensor in gather_hf_tensors(unwrap_model(trained), plan)}


def metrics_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    (run,) = folder.iterdir()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def megatrons(folder: Path, name: str) -> list[float]:
    """A scalar of Megatron's TensorBoard, by iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = events.Scalars(name)
    assert [scalar.step for scalar in scalars] == list(range(1, len(scalars) + 1))
    return [scalar.value for scalar in scalars]


def replay_with_pretrain(
    records: Path, folder: Path, model: Path, layout: dict[str, int], further: str
) -> dict[str, torch.Tensor]:
    flags = [
        *run_flags(model),
        *layout_flags(layout),
        *("--pdm-rollout-engine", "replay", "--pdm-rollout-replay-from", str(records)),
        *("--pdm-run-folder", str(folder / "runs"), "--tensorboard-dir", str(folder / "megatron")),
        *further.split(),
    ]
    weights: dict[str, torch.Tensor] = run_ranks(pretrain, 2, flags, str(model), layout)[0]
    return weights


def assert_same_steps(
    reference: Run, folder: Path, *, steps: int = STEPS, same_batches: bool = True
) -> None:
    """Loss and gradient of every step are those of `pdm-rl train`, to 1e-6.

    With the same micro-batches, every metric is. Otherwise rounding differs, which some metrics
    amplify: exponentials of sums over a sequence, signs of what is nearly zero.
    """
    expected, ours = reference.metrics("step"), metrics_of(folder / "runs", "step")
    assert [step["number"] for step in ours] == list(range(1, steps + 1))
    names = expected[0].keys() - {"kind", "grad_norm"}
    assert names == ours[0].keys() - {"kind"} and {"loss", "ppo_kl", "clip_fraction"} <= names
    for step, other in zip(expected, ours, strict=True):
        for name in names if same_batches else STABLE:
            assert other[name] == pytest.approx(step[name], rel=1e-6, abs=1e-6), name
        assert other["loss"] == pytest.approx(step["loss"], rel=1e-6, abs=1e-6)
    for name, own_name in (("grad-norm", "grad_norm"), ("policy loss", "loss")):
        logged = megatrons(folder / "megatron", name)
        assert logged == pytest.approx([step[own_name] for step in expected], rel=1e-6, abs=1e-6)
    assert max(abs(step["loss"]) for step in expected) > 1e-2, "there is something to compare"
    rollouts = metrics_of(folder / "runs", "rollout")
    for batch, other in zip(reference.metrics("rollout"), rollouts, strict=True):
        for name in ("reward", "response_tokens", "policy_version", "clip_fraction"):
            assert other[name] == pytest.approx(batch[name], rel=1e-6), name


def test_pretrain_on_recorded_rollouts_is_the_recorded_run(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    records = records_of(finished[0])
    flags = f"--micro-batch-size 8 --eval-iters 1 --eval-interval {STEPS} --rl-profile "
    flags += f"--rl-profile-dir {tmp_path / 'profile'}"
    ours = replay_with_pretrain(records, tmp_path, model, TENSOR, flags)
    assert_same_steps(finished[0], tmp_path)
    # Held-out batches are replayed in their order: the first, and only once, by either call.
    (held_out,) = metrics_of(tmp_path / "runs", "eval")
    assert held_out["number"] == 2
    assert held_out["heldout_reward"] == finished[0].metrics("eval")[0]["heldout_reward"]
    (profile,) = (tmp_path / "profile").iterdir()
    kinds = [json.loads(line)["kind"] for line in profile.read_text().splitlines()]
    assert kinds == ["interval"] * STEPS + ["total"]
    expected, start = weights(finished[0]), load_file(model / "model.safetensors")
    assert ours.keys() == expected.keys()
    moved = [float((tensor - start[name]).abs().max()) for name, tensor in expected.items()]
    assert max(moved) > 1e-3
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)


SPLIT = [
    pytest.param(DATA, "--overlap-grad-reduce --overlap-param-gather", id="data"),
    pytest.param({"pipeline": 2}, "", id="pipeline"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "further"), SPLIT)
def test_other_layouts(
    finished: tuple[Run, str], model: Path, tmp_path: Path, layout: dict[str, int], further: str
) -> None:
    """Several micro-batches a step, two passes over a batch, the mismatch of every token."""
    records = records_of(finished[0])
    settings = [f"parallel.{name}={layout.get(name, 1)}" for name in PARTS]
    settings += ["train.learning_rate=1.0e-5", "train.mismatch=every_token", "train.epochs=2"]
    reference = replay(tmp_path / "reference", model, records, settings)
    flags = f"--micro-batch-size 2 --lr 1e-5 --pdm-train-mismatch every_token {further}"
    flags += f" --grpo-iterations 2 --train-iters {2 * STEPS}"
    ours = replay_with_pretrain(records, tmp_path, model, layout, flags)
    assert_same_steps(reference, tmp_path, steps=2 * STEPS, same_batches=False)
    for name, tensor in weights(reference).items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
