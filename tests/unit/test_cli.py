# SPDX-License-Identifier: Apache-2.0
"""The user's mistakes: one clear line on stderr, exit code 2, nothing started."""

import json
from pathlib import Path

import pytest

from megatron.rl.cli import main
from tests import checkpoints

TASK = ["--set", "task.name=reasoning_gym/spell_backward"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("m") / "moe", checkpoints.QWEN3_MOE)


@pytest.fixture
def config_file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{device: cpu, folder: {tmp_path / 'runs'}}}\n"
        f"model: {{path: {model}, dtype: float32}}\n"
        "task: {name: reasoning_gym/spell_backward}\n"
        "rollout: {max_prompt_tokens: 64, max_response_tokens: 16}\n"
    )
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run `pdm-rl train` and return its one line of complaint."""
    assert main(["train", *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1, output.err
    return output.err


def test_no_such_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such config file: nowhere.yaml" in refused(capsys, "nowhere.yaml")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("loss.treshold=1", ["loss.treshold", "did you mean loss.threshold"]),
        ("rollout.top_p=0.95", ["rollout.top_p is 0.95", "support"]),
        ("rollout.top_logprobs=400", ["400", "301"]),
        ("parallel.tensor=3", ["parallel.tensor is 3", "4 attention heads"]),
        ("parallel.pipeline=3", ["parallel.pipeline is 3", "2 layers"]),
        ("parallel={pipeline: 2, virtual: 2}", ["parallel.virtual is 2", "the 1 layers"]),
        ("parallel.virtual=2", ["parallel.virtual is 2", "parallel.pipeline > 1"]),
        ("parallel={pipeline: 2, virtual: 1}", ["parallel.virtual is 1", "at least 2"]),
        ("parallel.last_stage_layers=1", ["parallel.last_stage_layers is 1", "pipeline > 1"]),
        (
            "parallel={pipeline: 2, last_stage_layers: 2}",
            ["parallel.last_stage_layers 2 leave 0 of the model's 2 layers", "1 other stages"],
        ),
        (
            "parallel={pipeline: 2, first_stage_layers: 2, last_stage_layers: 1}",
            ["first_stage_layers 2 and parallel.last_stage_layers 1 leave -1"],
        ),
        ("parallel.expert=3", ["parallel.expert is 3", "4 experts"]),
        ("parallel.expert=2", ["parallel.expert is 2", "ranks"]),
        ("rollout.max_response_tokens=100000", ["100064", "128 positions"]),
        ("task.name=unheard_of", ["task.name", "unheard_of"]),
        ("rollout.engine_args={max_logprobs: 5}", ["max_logprobs"]),
        ("rollout.engines_per_node=2", ["engines_per_node is 2", "expected 1 to 1"]),
        (
            "rollout={engine: replay, replay_from: nowhere, max_prompt_tokens: 64, "
            "max_response_tokens: 16}",
            ["no rollout records in nowhere"],
        ),
    ],
)
def test_bad_settings(
    capsys: pytest.CaptureFixture[str], config_file: Path, setting: str, words: list[str]
) -> None:
    line = refused(capsys, str(config_file), "--set", setting)
    assert all(word in line for word in words), line
    assert not (config_file.parent / "runs").exists()


def test_tensor_parallel_experts_without_sequence_parallelism(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    settings = ["--set", "parallel.tensor=2", "--set", "parallel.sequence=false"]
    assert "parallel.sequence" in refused(capsys, str(config_file), *settings)


def test_a_model_folder_without_weights(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    setting = ["--set", f"model.path={empty}"]
    assert "config.json" in refused(capsys, str(config_file), *setting)
    (empty / "config.json").write_text(json.dumps(checkpoints.QWEN3_MOE))
    assert "weights" in refused(capsys, str(config_file), *setting)


def test_a_model_of_another_kind(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "model_type is 'gpt2'" in refused(
        capsys, str(config_file), "--set", f"model.path={other}"
    )


def test_dry_run_prints_config_and_processes(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    assert main(["train", str(config_file), "--dry-run", "--set", "parallel.tensor=2"]) == 0
    printed = capsys.readouterr().out
    assert "direction: uniform" in printed
    assert "2 trainer ranks on cpu: tensor 2" in printed


def test_dry_run_prints_the_engines_and_their_prompts(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    settings = ["parallel.data=3", "rollout.engines_per_node=3", "rollout.prompts=64"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", str(config_file), "--dry-run", *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    places = ["prompts 0 to 20 of", "prompts 21 to 41 of", "prompts 42 to 63 of"]
    for number, (line, place) in enumerate(zip(lines, places, strict=True)):
        assert f"engine {number}: node 0, owned by rank {number}" in line and place in line
