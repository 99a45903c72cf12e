# SPDX-License-Identifier: Apache-2.0
"""What ``pdm-rl doctor CONFIG`` says of machines that a config cannot run on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.rl.config import Config, parse_config
from megatron.rl.config_findings import Surroundings, config_findings
from pdm_rl.doctor.finding import Finding
from tests.checkpoints import QWEN3, write_checkpoint

HOPPER = ("H200", (9, 0))
AMPERE = ("A100", (8, 0))
ENGINE = Finding("ok", "the rollout engine", "here")
VERSIONS = {"transformer-engine": "2.20.2"}


def config(path: Path, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"device": "cpu", "folder": str(path / "runs")},
        "model": {"path": str(path / "model"), "dtype": "float32"},
        "task": {"name": "reasoning_gym/spell_backward"},
        "rollout": {"prompts": 4, "max_prompt_tokens": 32, "max_response_tokens": 16},
        "train": {"minibatch_prompts": 4},
        "eval": {"prompts": 4},
        "bridge": {"probe_tokens": 8},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


def levels(
    config: Config,
    *gpus: Any,
    cuda: str | None = "13.0",
    versions: Mapping[str, str] = VERSIONS,
) -> dict[str, Finding]:
    here = Surroundings(tuple(gpus), cuda, versions)
    return {found.subject: found for found in config_findings(config, here, ENGINE)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", QWEN3)
    return tmp_path


def test_a_config_that_can_run(folder: Path) -> None:
    found = levels(config(folder, checkpoint={"every": 1, "min_free_gib": 0}), cuda=None)
    assert {one.level for one in found.values()} == {"ok"}, found
    assert {"config: model", "config: task", "config: checkpoints"} <= found.keys()
    assert "config: GPUs" not in found


def test_every_missing_part_is_told_at_once(tmp_path: Path) -> None:
    broken = config(tmp_path, task={"name": "math", "params": {"train": "/no/such/file"}})
    found = levels(broken)
    bad = {subject for subject, one in found.items() if one.level == "error"}
    assert bad == {"config: model", "config: rollouts", "config: task"}


def test_a_gpu_run_without_a_gpu(folder: Path) -> None:
    found = levels(config(folder, run={"device": "cuda"}))
    assert found["config: GPUs"].level == "error"


@pytest.mark.parametrize(
    ("ranks", "gpus", "level", "words"),
    [(2, 2, "ok", "2 ranks on 2"), (4, 2, "note", "2 nodes"), (3, 2, "error", "do not fill")],
)
def test_ranks_and_gpus(folder: Path, ranks: int, gpus: int, level: str, words: str) -> None:
    found = levels(
        config(folder, run={"device": "cuda"}, parallel={"data": ranks}), *[HOPPER] * gpus
    )
    assert found["config: GPUs"].level == level and words in found["config: GPUs"].text


def test_an_engine_larger_than_a_node(folder: Path) -> None:
    large = config(
        folder, run={"device": "cuda"}, rollout={"engine_args": {"tensor_parallel_size": 4}}
    )
    found = levels(large, HOPPER, HOPPER)
    assert "an engine takes 4 GPUs" in found["config: GPUs"].text


@pytest.mark.parametrize(
    ("gpu", "versions", "level"),
    [(HOPPER, VERSIONS, "ok"), (AMPERE, VERSIONS, "error"), (HOPPER, {}, "error")],
)
def test_fp8_needs_a_gpu_and_transformer_engine(
    folder: Path, gpu: Any, versions: dict[str, str], level: str
) -> None:
    fp8 = config(folder, run={"device": "cuda"}, model={"fp8": "blockwise"})
    assert levels(fp8, gpu, versions=versions)["config: FP8"].level == level


def test_checkpoints_that_do_not_fit(folder: Path) -> None:
    found = levels(config(folder, checkpoint={"every": 1, "min_free_gib": 1e7}))
    assert found["config: checkpoints"].level == "error"
    assert "checkpoint.keep" in found["config: checkpoints"].text
