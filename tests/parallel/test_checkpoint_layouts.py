# SPDX-License-Identifier: Apache-2.0
"""Saved in one layout, loaded in others: weights, masters, moments and steps, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import QWEN3, QWEN3_MOE, write_checkpoint
from tests.parallel.checkpoint_case import (
    STEPS_BEFORE,
    global_state,
    policy_in,
    run_state,
    train,
    writer_for,
)
from tests.parallel.spawn import run_ranks

Layout = dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """What rank 0 knows after saving, and after the two steps that followed."""

    state: dict[str, torch.Tensor]
    in_files: dict[str, torch.Tensor]
    following: list[tuple[float, float, float]]
    final: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    state: dict[str, torch.Tensor]
    steps: tuple[int, int]
    following: list[tuple[float, float, float]]
    final: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model in a layout, and the run folder of its checkpoints."""

    model: str
    folder: str
    layout: Layout
    dtype: str
    ddp: dict[str, bool]


def save_and_load(
    rank: int, world_size: int, saving: list[Case], loading: list[Case]
) -> tuple[list[Saved], list[Loaded]]:
    from megatron.rl import cpu_backend

    cpu_backend.install()
    return [_save(case) for case in saving], [_load(case) for case in loading]


def _save(case: Case) -> Saved:
    from megatron.core import dist_checkpointing, parallel_state

    policy = policy_in(case.model, case.layout, case.dtype, ddp=case.ddp)
    train(policy, STEPS_BEFORE)
    report = writer_started(policy, case.folder).save(run_state())
    assert report is not None and report.error is None, report
    state = global_state(policy)
    in_files: dict[str, Any] = dist_checkpointing.load_plain_tensors(str(report.path))
    assert in_files.pop("content_metadata")["singleton_local_shards"]
    saved = Saved(state, in_files, train(policy, 2, first=STEPS_BEFORE), global_state(policy))
    parallel_state.destroy_model_parallel()
    return saved


def writer_started(policy, folder: str):  # type: ignore[no-untyped-def]
    writer = writer_for(policy, folder)
    writer.start()
    return writer


def _load(case: Case) -> Loaded:
    from megatron.core import parallel_state

    from megatron.rl.checkpoint.optimizer_state import optimizer_step
    from megatron.rl.checkpoint.reader import find_newest

    policy = policy_in(case.model, case.layout, case.dtype, ddp=case.ddp)
    found = find_newest(Path(case.folder))
    assert found is not None
    assert found.load_into(policy) == run_state()
    steps = (optimizer_step(policy.optimizer), policy.schedule_steps)
    if case.ddp == WHOLE_STATE:  # which Megatron gathers in another form
        state = _saved_again(policy, f"{case.folder}-{case.layout}")
        loaded = Loaded(state, steps, train(policy, 2, first=STEPS_BEFORE), {})
    else:
        state = global_state(policy)
        loaded = Loaded(state, steps, train(policy, 2, first=STEPS_BEFORE), global_state(policy))
    parallel_state.destroy_model_parallel()
    return loaded


def _saved_again(policy, folder: str) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """Save what was loaded, and read it with Megatron's reader; padding is cut off."""
    from megatron.core import dist_checkpointing

    report = writer_started(policy, folder).save(run_state())
    assert report is not None and report.error is None, report
    tensors: dict[str, Any] = dist_checkpointing.load_plain_tensors(str(report.path))
    del tensors["content_metadata"]
    rows = policy.architecture.vocab_size
    return {
        key: tensor[:rows] if "word_embeddings" in key or "output_layer" in key else tensor
        for key, tensor in tensors.items()
    }


MODELS = {
    "dense": QWEN3,
    "moe": QWEN3_MOE,
    # Fewer key-value heads than tensor-parallel ranks, and an embedding on both end stages.
    "tied": QWEN3 | {"num_key_value_heads": 1, "tie_word_embeddings": True},
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
WHOLE_STATE = {"use_distributed_optimizer": False}
# By model: its type, and the layout and DDP settings in which it is saved.
SOURCES: dict[str, tuple[str, Layout, dict[str, bool]]] = {
    "moe": ("float32", {"tensor": 2, "pipeline": 2, "expert": 2}, {}),
    "dense": ("bfloat16", {"tensor": 2, "data": 2}, OVERLAP),
    "tied": ("bfloat16", {"tensor": 2, "pipeline": 2}, {}),
}
# By number of ranks: model, and the layout and DDP settings in which it is loaded.
TARGETS: dict[int, list[tuple[str, Layout, dict[str, bool]]]] = {
    1: [("moe", {}, {}), ("dense", {}, {}), ("tied", {}, WHOLE_STATE)],
    2: [
        ("moe", {"data": 2, "expert": 2}, OVERLAP),
        ("dense", {"pipeline": 2}, {}),
        ("dense", {"data": 2}, WHOLE_STATE),
        ("tied", {"tensor": 2}, {}),
    ],
    4: [
        ("moe", {"tensor": 2, "pipeline": 2, "expert": 2}, {}),
        ("dense", {"tensor": 2, "data": 2}, OVERLAP),
        ("tied", {"tensor": 4}, {}),
    ],
}


@dataclass(frozen=True)
class Runs:
    root: Path
    saved: dict[str, Saved]
    loaded_in_4_ranks: list[Loaded]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    for name, config in MODELS.items():
        write_checkpoint(root / name, config)
    saving = [case_of(root, name, layout, ddp) for name, (_, layout, ddp) in SOURCES.items()]
    loading = [case_of(root, *target) for target in TARGETS[4]]
    saved, loaded = run_ranks(save_and_load, 4, saving, loading, timeout_s=400.0)[0]
    return Runs(root, dict(zip(SOURCES, saved, strict=True)), loaded)


def case_of(root: Path, name: str, layout: Layout, ddp: dict[str, bool]) -> Case:
    return Case(str(root / name), str(root / f"run-{name}"), layout, SOURCES[name][0], ddp)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


def assert_trained(saved: Saved) -> None:
    moments = [key for key in saved.state if key.startswith("optimizer.state.exp_avg_sq.")]
    assert moments and all(saved.state[key].any() for key in moments)


def test_tensor_parallel_experts_load_in_other_layouts(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "moe", QWEN3_MOE))
    folder = str(tmp_path / "run")
    saving = [Case(model, folder, {"tensor": 2, "expert": 2}, "float32", {})]
    others: list[Layout] = [{"data": 2, "expert": 2}, {"pipeline": 2}]
    loading = [Case(model, folder, layout, "float32", {}) for layout in others]
    (saved,), loaded = run_ranks(save_and_load, 2, saving, loading)[0]
    assert_trained(saved)
    for found in loaded:
        assert found.steps == (STEPS_BEFORE, STEPS_BEFORE)
        assert_equal(found.state, saved.state)
        assert [step[:2] for step in found.following] == [step[:2] for step in saved.following]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_files_hold_what_megatron_gathers(runs: Runs, name: str) -> None:
    """Read by Megatron's own reader; only the padding of the vocabulary is more."""
    saved = runs.saved[name]
    assert saved.in_files.keys() == saved.state.keys()
    for key, tensor in saved.state.items():
        stored = saved.in_files[key]
        assert torch.equal(stored[: len(tensor)], tensor), key
        assert not stored[len(tensor) :].any()
    assert_trained(saved)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", TARGETS)
def test_loads_in_another_layout(runs: Runs, world_size: int) -> None:
    loading = [case_of(runs.root, *target) for target in TARGETS[world_size]]
    if world_size == 4:
        results = runs.loaded_in_4_ranks
    else:
        results = run_ranks(save_and_load, world_size, [], loading, timeout_s=300.0)[0][1]
    for (name, layout, ddp), loaded in zip(TARGETS[world_size], results, strict=True):
        saved = runs.saved[name]
        assert loaded.steps == (STEPS_BEFORE, STEPS_BEFORE)
        assert_equal(loaded.state, saved.state)
        for found, expected in zip(loaded.following, saved.following, strict=True):
            assert found[:2] == expected[:2], "learning rate and weight decay"
            if SOURCES[name][0] == "float32":
                assert found[2] == pytest.approx(expected[2], rel=1e-4), "gradient norm"
        if (layout, ddp) == SOURCES[name][1:]:
            assert_equal(loaded.final, saved.final)
