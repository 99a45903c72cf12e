# SPDX-License-Identifier: Apache-2.0
"""nvidia-modelopt, in an environment made as the documentation says, quantises tiny models."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.rl.cli import main
from megatron.rl.weights.block_fp8 import is_quantized
from megatron.rl.weights.modelopt_handover import REQUIREMENTS
from tests.checkpoints import QWEN3, QWEN3_MOE, write_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def modelopt_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("needs uv, to make an environment for nvidia-modelopt")
    folder = tmp_path_factory.mktemp("modelopt") / "venv"
    base = Path(sys.base_prefix) / "bin" / "python3"
    subprocess.run([uv, "venv", "--quiet", "--python", base, folder], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *REQUIREMENTS], check=True)
    return python


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("calibration") / "tokens.jsonl"
    lines = [json.dumps([draw.randrange(301) for _ in range(32)]) for _ in range(8)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_fp8(tmp_path: Path, modelopt_python: str, calibration: str, kind: str) -> None:
    config = QWEN3 if kind == "dense" else QWEN3_MOE
    if kind == "dense":  # not every checkpoint names its architecture
        config = {key: value for key, value in config.items() if key != "architectures"}
    source = write_checkpoint(tmp_path / "source", config)
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    arguments = ["--format", "modelopt:fp8", "--modelopt-python", modelopt_python]
    arguments += ["--calibration", calibration]
    assert main(["export", str(source), "--out", str(out), *arguments]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert (out / "tokenizer.json").read_text() == "{}"

    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "FP8")
    exported = load_file(out / "model.safetensors")
    for name, original in load_file(source / "model.safetensors").items():
        stored = exported[name]
        if not is_quantized(name):
            assert torch.equal(stored.float(), original)
            continue
        assert stored.dtype == torch.float8_e4m3fn
        assert exported[name.removesuffix("weight") + "input_scale"] > 0
        back = stored.double() * exported[name + "_scale"].double()
        # One scale a tensor, 3 mantissa bits: 1/16 of the value, or half a subnormal step.
        allowed = original.double().abs() / 16 + float(exported[name + "_scale"]) * 2.0**-10
        assert bool(((back - original).abs() <= allowed * (1 + 1e-5)).all())


def test_what_the_user_can_mend(
    tmp_path: Path, modelopt_python: str, calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_checkpoint(tmp_path / "source", QWEN3))
    base = ["export", source, "--out", str(tmp_path / "out"), "--modelopt-python", modelopt_python]
    assert main([*base, "--format", "modelopt:fp8"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("give it --calibration")
    assert main([*base, "--format", "modelopt:fp9", "--calibration", calibration]) == 2
    assert "modelopt has no 'fp9'; it has fp8, " in capsys.readouterr().err
    # A hidden size of 64 has no whole block of 128: modelopt's own error, and its log stays.
    assert main([*base, "--format", "modelopt:int4_awq", "--calibration", calibration]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: nvidia-modelopt failed with exit code 1: NotImplementedError")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.modelopt.log", "source"]
