# SPDX-License-Identifier: Apache-2.0
"""Users' mistakes with `pdm-rl eval` and the section eval of a config: one line, exit code 2."""

import json
from pathlib import Path

import pytest

from megatron.rl.cli import main
from megatron.rl.config import parse_config
from megatron.rl.errors import UserError
from megatron.rl.evaluation.config_check import bench_sampling
from megatron.rl.rollout.from_config import longest_sequence
from tests import checkpoints

BASE = {"model": {"path": "unused"}, "task": {"name": "unused"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "found neither at" in refused(capsys, str(tmp_path), "--bench", "gsm8k")
    (tmp_path / "config.yaml").write_text("")
    assert "wrote no policy/" in refused(capsys, str(tmp_path), "--bench", "gsm8k")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bench", ","], "expected the name of a benchmark"),
        (["--bench", "gsm8k", "--problems", "0"], "--problems: expected at least 1"),
        (["--bench", "gsm8k"], "PDM_RL_DATA"),
        (["--bench", "gsm8k", "--data", "nowhere"], "no such folder of data"),
        (["--bench", "x=nowhere.jsonl"], "no such file"),
        (["--bench", "reasoning_gym/x", "--data", "."], "--data has no effect"),
        (["--bench", "reasoning_gym/x", "--format", "boxed"], "--format has no effect"),
        (["--bench", "reasoning_gym/x", "--samples", "0"], "samples: expected 1"),
        (["--bench", "reasoning_gym/x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--bench", "reasoning_gym/x", "--temperature", "0"], "samples: expected 1 with temp"),
        (["--bench", "reasoning_gym/x", "--scoring-timeout", "0"], "scoring.timeout_s: expected"),
        (["--bench", "reasoning_gym/x", "--scoring-workers", "0"], "scoring.workers: expected"),
    ],
)
def test_refused_options(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.delenv("PDM_RL_DATA", raising=False)
    assert words in refused(capsys, str(checkpoint), *arguments)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"samples": 4}, "eval.samples: expected 16, got 4: it has no effect without eval.benches"),
        ({"problems": 4}, "eval.problems: expected None"),
        ({"data": "x"}, "eval.data: expected None"),
        ({"benches": {"a": "x"}, "data": "x"}, "eval.data has no effect"),
        ({"benches": ["a"], "samples": 0}, "eval.samples: expected a positive number"),
        ({"benches": ["a"], "temperature": 0.0}, "eval.samples: expected 1 with temperature 0"),
        ({"benches": ["a"], "min_p": 2.0}, "eval.min_p must be in"),
        ({"max_response_tokens": 0}, "eval.max_response_tokens: expected a positive number"),
    ],
)
def test_refused_sections(section: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_config(BASE | {"eval": section})


def test_benches_of_a_run_are_looked_for_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = checkpoints.write_checkpoint(tmp_path / "moe", checkpoints.QWEN3_MOE)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"run: {{device: cpu, folder: {tmp_path / 'runs'}}}\n"
        f"model: {{path: {model}, dtype: float32}}\n"
        "task: {name: reasoning_gym/spell_backward}\n"
        "rollout: {max_prompt_tokens: 64, max_response_tokens: 16}\n"
        f"eval: {{benches: [gsm8k], data: {tmp_path}}}\n"
    )
    assert main(["train", str(config)]) == 2
    assert "bench gsm8k" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_no_benches_on_a_replay() -> None:
    rollout = {"engine": "replay", "replay_from": "x"}
    with pytest.raises(UserError, match=r"eval\.benches: expected none with rollout.engine replay"):
        parse_config(BASE | {"rollout": rollout, "eval": {"benches": ["gsm8k"]}})


def test_sampling_of_evaluation_is_its_own() -> None:
    section = {
        "benches": ["gsm8k"],
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.05,
        "temperature": 0.6,
        "max_response_tokens": 900,
        "samples": 4,
    }
    rollout = {"max_prompt_tokens": 100, "max_response_tokens": 500}
    config = parse_config(BASE | {"rollout": rollout, "eval": section, "run": {"seed": 5}})
    sampling = bench_sampling(config)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.95, 50, 0.05)
    assert (sampling.temperature, sampling.max_tokens) == (0.6, 900)
    assert (sampling.samples, sampling.seed) == (4, 5)
    assert longest_sequence(config) == 1000
    assert config.rollout.top_p == 1.0


def test_response_limit_is_that_of_rollouts_unless_it_is_set() -> None:
    config = parse_config(BASE | {"rollout": {"max_prompt_tokens": 10, "max_response_tokens": 50}})
    assert config.eval.response_limit(config.rollout) == 50
    assert longest_sequence(config) == 60
