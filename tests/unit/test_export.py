# SPDX-License-Identifier: Apache-2.0
"""`pdm-rl export`: what it writes, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.rl.cli import main
from megatron.rl.weights import export, hf_files
from megatron.rl.weights.block_fp8 import BlockFP8, dequantize_weight, is_quantized, quantize_weight
from tests.checkpoints import QWEN3, QWEN3_MOE, WHOLE_BLOCKS, random_tensors, write_checkpoint

CONFIGS = {"dense": QWEN3 | WHOLE_BLOCKS, "moe": QWEN3_MOE | WHOLE_BLOCKS}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", params=CONFIGS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_checkpoint(folder, CONFIGS[request.param])
    (folder / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "dense", CONFIGS["dense"])


def run(*arguments: object) -> None:
    assert main(["export", *map(str, arguments)]) == 0


def refused(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["export", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and output.err.count("\n") == 1, output.err
    return output.err


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("float32", torch.float32)])
def test_unquantised(
    source: Path, tmp_path: Path, capsys: Capture, name: str, dtype: torch.dtype
) -> None:
    run(source, "--out", tmp_path / "out", "--format", name)
    exported, original = tensors_of(tmp_path / "out"), tensors_of(source)
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key].to(dtype)) for key in original)
    assert all(tensor.dtype == dtype for tensor in exported.values())
    expected = config_of(source) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    assert config_of(tmp_path / "out") == expected
    copied = (tmp_path / "out" / "tokenizer.json").read_text()
    assert copied == (source / "tokenizer.json").read_text()
    output = capsys.readouterr()
    assert output.err == ""
    nbytes = sum(tensor.nbytes for tensor in exported.values())
    assert f"{len(original)} tensors, {nbytes / 1e6:,.1f} MB, {name}" in output.out


@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
def test_block_fp8(source: Path, tmp_path: Path, scales: Any, capsys: Capture) -> None:
    run(source, "--out", tmp_path / "out", "--format", "block_fp8", "--scales", scales)
    assert capsys.readouterr().err == ""
    exported, original = tensors_of(tmp_path / "out"), tensors_of(source)
    for name, tensor in original.items():
        if is_quantized(name):
            quantized = quantize_weight(tensor, BlockFP8(scales))
            scale_inv = exported.pop(name + "_scale_inv")
            assert torch.equal(exported[name].view(torch.uint8), quantized.data.view(torch.uint8))
            assert torch.equal(scale_inv, quantized.scale_inv)
        else:
            assert torch.equal(exported[name], tensor.bfloat16())
    assert exported.keys() == original.keys()
    config = config_of(tmp_path / "out")
    kept = ["lm_head", "model.embed_tokens"]
    if "num_experts" in config:
        kept += ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["quantization_config"]["modules_to_not_convert"] == kept


def test_transformers_reads_what_the_source_holds(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run(source, "--out", tmp_path / "a", "--format", "bf16")
    run(tmp_path / "a", "--out", tmp_path / "b", "--format", "float32")
    tokens = torch.randint(0, 301, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = []
    for folder in (source, tmp_path / "a", tmp_path / "b"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_tied_head_is_named_as_kept(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tied", CONFIGS["dense"] | {"tie_word_embeddings": True})
    run(tmp_path / "tied", "--out", tmp_path / "out", "--format", "block_fp8")
    kept = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert kept == ["model.embed_tokens", "lm_head"]


def test_the_newer_name_of_the_precision_is_kept(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new", CONFIGS["dense"] | {"dtype": "float32"})
    run(tmp_path / "new", "--out", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config


@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
def test_from_block_fp8(source: Path, tmp_path: Path, scales: str) -> None:
    run(source, "--out", tmp_path / "fp8", "--format", "block_fp8", "--scales", scales)
    run(tmp_path / "fp8", "--out", tmp_path / "plain", "--format", "float32")
    run(tmp_path / "fp8", "--out", tmp_path / "again", "--format", "block_fp8", "--scales", scales)
    assert "quantization_config" not in config_of(tmp_path / "plain")
    assert config_of(tmp_path / "again") == config_of(tmp_path / "fp8")
    quantised, plain, again = (tensors_of(tmp_path / name) for name in ("fp8", "plain", "again"))
    assert quantised.keys() == again.keys()
    for name, tensor in plain.items():
        for stored in (quantised, again):
            scale_inv = stored.get(name + "_scale_inv")
            value = (
                stored[name] if scale_inv is None else dequantize_weight(stored[name], scale_inv)
            )
            assert torch.equal(tensor, value.float())


def test_many_shards(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_files, "MAX_SHARD_BYTES", 60_000)
    run(dense, "--out", tmp_path / "out")
    weight_map = json.loads((tmp_path / "out" / hf_files.INDEX_NAME).read_text())["weight_map"]
    shards = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(shards) > 3 and set(weight_map.values()) == shards
    for name, tensor in tensors_of(dense).items():
        stored = load_file(tmp_path / "out" / weight_map[name])[name]
        assert torch.equal(stored, tensor.bfloat16())


def test_a_run_folder_means_its_policy(dense: Path, tmp_path: Path, capsys: Capture) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "config.yaml").write_text("")
    assert "wrote no policy/" in refused(capsys, run_folder, "--out", tmp_path / "out")
    dense.rename(run_folder / "policy")
    run(run_folder, "--out", tmp_path / "out")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(run_folder / "policy").keys()


def test_never_overwrites_unasked(dense: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    run(dense, "--out", out)
    assert "--force" in refused(capsys, dense, "--out", out, "--format", "block_fp8")
    assert "quantization_config" not in config_of(out)
    run(dense, "--out", out, "--format", "block_fp8", "--force")
    assert "quantization_config" in config_of(out)

    other = tmp_path / "other"
    other.mkdir()
    run(dense, "--out", other)  # an empty folder is free
    (other / "config.json").unlink()
    assert "no checkpoint" in refused(capsys, dense, "--out", other, "--force")
    assert "not a folder" in refused(capsys, dense, "--out", dense / "config.json")
    for folder in (dense, tmp_path):
        assert "holds the source" in refused(capsys, dense, "--out", folder, "--force")
    assert tensors_of(dense)


def test_a_failed_export_leaves_what_was_there(
    dense: Path, tmp_path: Path, capsys: Capture
) -> None:
    run(dense, "--out", tmp_path / "out")
    before = sorted(tmp_path.iterdir())
    tensors = random_tensors(CONFIGS["dense"], seed=0)
    bad = "model.layers.1.mlp.up_proj.weight"
    tensors[bad][3, :2] = torch.tensor([torch.inf, torch.nan])
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    line = refused(capsys, dense, "--out", tmp_path / "out", "--format", "block_fp8", "--force")
    assert bad in line and "2 of 32,768" in line
    assert sorted(tmp_path.iterdir()) == before
    assert "quantization_config" not in config_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "int3"], "expected bf16, float32, block_fp8 or modelopt:NAME, got 'int3'"),
        (["--format", "bf16", "--scales", "float32"], "--scales float32 has no effect"),
        (["--modelopt-python", "python"], "--modelopt-python has no effect"),
        (["--calibration", "x"], "--calibration has no effect"),
        (["--format", "modelopt:fp8", "--scales", "float32"], "--scales has no effect"),
        (["--format", "modelopt:fp8"], "--modelopt-python is missing"),
        (
            ["--format", "modelopt:fp8", "--modelopt-python", "/nowhere/python"],
            "/nowhere/python is not an interpreter",
        ),
        (
            ["--format", "modelopt:fp8", "--modelopt-python", sys.executable, "--calibration", "x"],
            "--calibration: no such file: x",
        ),
    ],
)
def test_arguments(
    dense: Path, tmp_path: Path, capsys: Capture, arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, dense, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_sources(dense: Path, tmp_path: Path, capsys: Capture) -> None:
    out = ("--out", tmp_path / "out")
    assert "no such folder" in refused(capsys, tmp_path / "none", *out)
    (tmp_path / "empty").mkdir()
    assert "found neither" in refused(capsys, tmp_path / "empty", *out)
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "no *.safetensors" in refused(capsys, tmp_path / "empty", *out)

    config = dense / "config.json"
    good = config.read_text()
    config.write_text("{")
    assert "not JSON" in refused(capsys, dense, *out)
    config.write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert "'awq'" in refused(capsys, dense, *out)
    config.write_text(good)

    name = "model.layers.0.mlp.up_proj.weight"
    tensors = random_tensors(CONFIGS["dense"], seed=0)
    save_file(tensors | {name + "_scale_inv": torch.ones(2, 1)}, dense / "model.safetensors")
    assert "no quantization_config" in refused(capsys, dense, *out)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, dense / "model.safetensors")
    assert f"{name} is in FP8" in refused(capsys, dense, *out)
    save_file(
        tensors | {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 4)},
        dense / "model.safetensors",
    )
    assert "one tensor per expert" in refused(capsys, dense, *out, "--format", "block_fp8")
    assert not (tmp_path / "out").exists()


def test_ragged_weights_are_noted(tmp_path: Path, capsys: Capture) -> None:
    ragged = write_checkpoint(tmp_path / "ragged", QWEN3)
    run(ragged, "--out", tmp_path / "out", "--format", "block_fp8")
    note = capsys.readouterr().err
    assert note.startswith("note: 14 quantised weights have a side") and note.count("\n") == 1


def test_long_exports_show_progress(
    dense: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "PROGRESS_INTERVAL_S", 0.0)
    run(dense, "--out", tmp_path / "out")
    assert "exported 3 of 25 tensors\n" in capsys.readouterr().err


def test_an_interpreter_without_modelopt(dense: Path, tmp_path: Path, capsys: Capture) -> None:
    before = sorted(tmp_path.iterdir())
    arguments = ["--format", "modelopt:fp8", "--modelopt-python", sys.executable]
    assert main(["export", str(dense), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert "cannot import nvidia-modelopt" in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before
