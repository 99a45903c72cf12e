# SPDX-License-Identifier: Apache-2.0
"""A whole run: Megatron on two ranks, vLLM, the mask; and what happens when parts of it die."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from megatron.rl.config import load_config
from tests.e2e.runs import (
    Run,
    assert_all_gone,
    engine_process,
    rank_processes,
    start,
    wait_for_engine,
)

pytestmark = pytest.mark.engine


def test_output_is_quiet_and_ends_with_the_result(finished: tuple[Run, str]) -> None:
    lines = finished[1].strip().splitlines()
    assert lines[-1].startswith("held-out reward: ")
    assert " -> " in lines[-1]
    noise = ("Warning", "WARNING", "Traceback", "site-packages", "DEPRECATED")
    assert not [line for line in lines if any(word in line for word in noise)]


def test_metrics_of_every_step_and_rollout(finished: tuple[Run, str]) -> None:
    run = finished[0]
    steps, rollouts = run.metrics("step"), run.metrics("rollout")
    assert [record["number"] for record in rollouts] == [1, 2]
    assert [record["number"] for record in steps] == list(range(1, 9)), "4 steps a rollout"
    assert all(record["optimizer_steps"] == 4 for record in rollouts)
    assert [record["policy_version"] for record in rollouts] == [0, 1]
    assert sum(record["tokens"] for record in steps[:4]) == rollouts[0]["response_tokens"]
    assert any((run.run_folder / "tensorboard").iterdir())


def test_before_the_first_update_trainer_and_engine_agree(finished: tuple[Run, str]) -> None:
    steps = finished[0].metrics("step")
    for first in (steps[0], steps[4]):
        assert 0 < first["mismatch/engine/log_prob_max"] < 1e-4
        assert first["mismatch_kl/max"] < 1e-8
        assert first["mismatch/update/kl"] == 0.0
    assert steps[1]["mismatch/engine/kl"] == steps[0]["mismatch/engine/kl"]
    assert steps[1]["mismatch/total/log_prob_max"] > 1e-3, "an update moves the policy"
    assert all(step["staleness/lag_0"] == 1.0 for step in steps)
    assert [step["staleness/optimizer_steps"] for step in steps] == [0, 1, 2, 3] * 2


def test_later_steps_leave_the_trust_region_and_are_vetoed(finished: tuple[Run, str]) -> None:
    steps = finished[0].metrics("step")
    firsts, later = [steps[0], steps[4]], [*steps[1:4], *steps[5:]]
    assert all(step["outside_fraction"] == 0.0 for step in firsts)
    assert any(step["outside_fraction"] > 0.0 for step in later)
    assert any(step["clip_fraction"] > 0.0 for step in later)
    assert all(step["clip_fraction"] <= step["outside_fraction"] for step in steps)


def test_resolved_config_is_saved(finished: tuple[Run, str]) -> None:
    config = load_config(finished[0].run_folder / "config.yaml")
    assert config.parallel.tensor == 2 and config.loss.threshold == 0.01
    assert (finished[0].run_folder / "environment.json").exists()


def test_exported_policy_is_the_trained_one(finished: tuple[Run, str], model: Path) -> None:
    """transformers loads it, and its log-probs are those that the engine had at the end."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    exported = finished[0].run_folder / "policy"
    before, after = (load_file(folder / "model.safetensors") for folder in (model, exported))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "norm" not in name)
    policy = AutoModelForCausalLM.from_pretrained(exported)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    logits = policy(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()


def test_a_killed_engine_is_replaced_and_a_killed_launcher_leaves_nothing(
    tmp_path: Path, model: Path
) -> None:
    run = start(tmp_path, model, ["train.rollouts=200", "train.minibatch_prompts=8"])
    run.wait_for_rollout(1)
    first = engine_process(run)
    processes = [*run.descendants()]
    done = len(run.metrics("rollout"))
    killed_at = time.monotonic()
    first.kill()
    run.wait_for_rollout(done + 2)
    assert time.monotonic() - killed_at < 60
    assert engine_process(run).pid != first.pid
    latest = run.metrics("rollout")[-1]
    assert latest["policy_version"] == latest["number"] - 1, "the restarted engine has the weights"
    # Even SIGKILL, which nothing can answer, takes everything along, the new engine too.
    processes += run.descendants()
    run.process.kill()
    output, _ = run.process.communicate()
    assert "restart 1 of 2" in output
    assert_all_gone(processes)


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, model: Path) -> None:
    run = start(tmp_path, model)
    engine = wait_for_engine(run)
    processes = run.descendants()
    assert engine in processes
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait(30)
    assert code == 128 + signal.SIGINT
    assert "stopped; what was written is in" in output
    assert "Traceback" not in output
    assert_all_gone(processes)


def test_a_killed_rank_ends_the_run_with_one_line(tmp_path: Path, model: Path) -> None:
    run = start(tmp_path, model, ["train.rollouts=200"])
    run.wait_for_rollout(1)
    processes = run.descendants()
    rank_processes(run)[1].kill()
    killed_at = time.monotonic()
    code, output = run.wait(60)
    assert time.monotonic() - killed_at < 30
    assert code == 1
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "rank" in errors[0]
    assert_all_gone(processes)


def test_an_error_in_a_rank_is_the_users_when_it_is(tmp_path: Path, model: Path) -> None:
    run = start(tmp_path, model, ["megatron.transformer={hiden_size: 3}"])
    code, output = run.wait()
    assert code == 2
    assert "error: megatron.transformer.hiden_size: TransformerConfig has no such field" in output


@pytest.mark.slow
def test_every_mask_trains_and_zero_advantages_do_not(tmp_path: Path, model: Path) -> None:
    from safetensors.torch import load_file

    masks = {
        "none": ["loss.mask=none"],
        "clip": ["loss.mask=ratio_clip"],
        "dppo": ["loss.direction=ratio"],
        "aggregated": ["loss.direction=aggregated"],
        "uniform": ["loss.direction=uniform"],
        "exact": ["loss.direction=exact"],
        "certified": ["loss.direction=certified"],
        "sequences": [
            "loss.sequence_mask={criterion: max, divergence: topk_kl, max_threshold: 0.01}"
        ],
        "zero": ["train.advantage_scale=0"],
    }
    weights, vetoed, accepted = {}, {}, {}
    for name, settings in masks.items():
        run = start(tmp_path / name, model, [*settings, "train.weight_decay=0"])
        code, output = run.wait()
        assert code == 0, output
        weights[name] = load_file(run.run_folder / "policy" / "model.safetensors")
        vetoed[name] = sum(record["vetoed_tokens"] for record in run.metrics("step"))
        accepted[name] = [record.get("sequence_acceptance") for record in run.metrics("step")]
    start_weights = load_file(model / "model.safetensors")
    assert _same(weights.pop("zero"), start_weights), "nothing may be learnt from nothing"
    assert vetoed.pop("zero") == vetoed.pop("none") == 0
    assert min(vetoed.values()) > 0, vetoed
    assert min(accepted["sequences"]) < 1 and accepted["uniform"][0] is None
    for name, trained in weights.items():
        assert not _same(trained, start_weights), name
        assert name == "none" or not _same(trained, weights["none"]), name


@pytest.mark.slow
def test_scoring_every_token_changes_metrics_alone(
    tmp_path: Path, model: Path, finished: tuple[Run, str]
) -> None:
    from safetensors.torch import load_file

    run = start(tmp_path, model, ["train.mismatch=every_token"])
    code, output = run.wait()
    assert code == 0, output
    for step in run.metrics("step"):
        assert 0 < step["mismatch/engine/log_prob_max"] < 1e-4
        parts = step["mismatch/engine/kl"] + step["mismatch/update/kl"]
        assert parts == pytest.approx(step["mismatch/total/kl"], abs=1e-12)
        moved = step["staleness/optimizer_steps"] > 0
        assert (step["mismatch/update/prob_max"] > 1e-3) == moved
    weights, others = (
        load_file(folder / "policy" / "model.safetensors")
        for folder in (run.run_folder, finished[0].run_folder)
    )
    assert _same(weights, others)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())
