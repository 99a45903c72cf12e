# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl plan`` from the outside: exit codes, table and JSON, suggestions, rates."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.rl.cli import main
from tests.checkpoints import QWEN3_30B
from tests.real_models import QWEN3_8B

RECIPES = Path(__file__).parents[2] / "examples" / "rl"
FLAGSHIP = str(RECIPES / "qwen3_30b_fp8_e2e.yaml")


@pytest.fixture
def config_30b(tmp_path: Path) -> str:
    path = tmp_path / "30b.json"
    path.write_text(json.dumps(QWEN3_30B))
    return str(path)


@pytest.fixture
def config_8b(tmp_path: Path) -> str:
    path = tmp_path / "8b.json"
    path.write_text(json.dumps(QWEN3_8B))
    return str(path)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_flagship_fits_its_cluster(config_30b: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", FLAGSHIP, "--gpus", "32", "--gpu-memory", "96")
    assert main([*arguments, "--model-config", config_30b]) == 0
    text = capsys.readouterr().out
    assert "30.53 B parameters, 3.35 B active" in text
    assert "8 of 4 GPUs, shared, in turn" in text
    assert "fits; memory binds first in start" in text
    assert "time binds first in" in text
    for phase in ("sample", "train", "sync", "hand over"):
        assert phase in text


def test_table_and_json_agree(config_30b: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = _json(capsys, FLAGSHIP, "--model-config", config_30b)
    assert code == 0 and report["fits"] and report["suggestion"] is None
    assert report["parameters"]["total"] == 30_532_122_624
    for phase in report["memory"]["phases"]:
        assert phase["total"] == sum(phase["parts"].values()) <= phase["limit"]
    for time in report["times"]:
        assert time["seconds"] == pytest.approx(sum(time["shares"].values()))
        assert time["shares"][time["limit"]] == max(time["shares"].values())
    # 117 bytes a sampled token, K = 20 (docs/performance.md has 118 with a sequence's own).
    traffic = report["traffic"]
    assert traffic["rollout_bytes"] == 117 * traffic["response_tokens"]
    assert traffic["sequences"] == 128 * 16 and traffic["steps"] == 8


def test_a_layout_that_does_not_fit_gets_one_that_does(
    config_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(RECIPES / "qwen3_8b.yaml"), "--model-config", config_8b, "--gpus", "8"]
    given += ["--gpu-memory", "79.6", "--set", "parallel.tensor=1", "--set", "parallel.data=8"]
    code, report = _json(capsys, *given)
    assert code == 1 and not report["fits"]
    assert any(problem.startswith("train: ") for problem in report["problems"])
    changes = shlex.split(report["suggestion"]["arguments"])
    code, better = _json(capsys, *given, *changes)
    assert code == 0 and better["fits"]


def test_too_few_gpus(config_30b: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = (FLAGSHIP, "--model-config", config_30b, "--gpus", "16", "--gpu-memory", "140")
    code, report = _json(capsys, *given)
    assert code == 1
    assert report["problems"][0].startswith("32 GPUs are needed, 16 are there")
    code, better = _json(capsys, *given, *shlex.split(report["suggestion"]["arguments"]))
    assert code == 0 and better["cluster"]["gpus"] == 16


def test_no_layout_fits(config_30b: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", FLAGSHIP, "--model-config", config_30b, "--gpus", "2"]
    assert main([*arguments, "--gpu-memory", "40"]) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "no layout of these GPUs fits" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has no config.json here; name one with --model-config FILE"),
        (["--model-config", "absent.json"], "--model-config absent.json: No such file"),
        (["--gpus", "0"], "--gpus: expected a positive number, got 0"),
        (["--gpu-memory", "-1"], "--gpu-memory: expected a positive number"),
        (["--gpu", "a100"], "--gpu: expected one of h20, h100, h200, got a100"),
        (["--response-tokens", "9000"], "--response-tokens: expected 1 to"),
        (["--set", "parallel.expert=7"], "parallel.expert is 7, which does not divide"),
        (
            ["--set", "rollout.engine_args={tensor_parallel_size: 4}"],
            "192 FFN columns, which is no multiple of the FP8 block 128; possible sizes are 1, 2",
        ),
        (["--set", "rollout.engines_per_node=4"], "4 engines (rollout.engines_per_node) of 4 GPUs"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, config_30b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", FLAGSHIP, *arguments]
    if "--model-config" not in arguments and arguments:
        given += ["--model-config", config_30b]
    assert main(given) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_folder_with_a_config_json_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    code, report = _json(capsys, FLAGSHIP, "--set", f"model.path={tmp_path}")
    assert code == 0 and report["parameters"]["active"] == 3_353_032_704


def test_rates_are_replaced(
    config_30b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (FLAGSHIP, "--model-config", config_30b, "--gpus", "32")
    _, before = _json(capsys, *given, "--gpu", "h20")
    rates = tmp_path / "rates.yaml"
    # Twice the H20's FP8 rate; a number that YAML 1.1 reads as text.
    rates.write_text("gpu: {fp8_flops: 592e12}\nassumptions: {expert_imbalance: 1.0}\n")
    _, after = _json(capsys, *given, "--gpu", "h20", "--rates", str(rates))
    assert after["cluster"]["gpu"]["fp8_flops"] == 592e12

    def seconds(report: dict[str, Any], phase: str, share: str) -> float:
        (found,) = [time for time in report["times"] if time["phase"] == phase]
        return float(found["shares"][share])

    ratio = seconds(after, "train", "matrix products") / seconds(before, "train", "matrix products")
    assert 0.5 < ratio < 1.0  # attention and head stay in BF16
    (stage_before,), (stage_after,) = (r["memory"]["stages"] for r in (before, after))
    assert stage_after["activations"] < stage_before["activations"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: {flops: 1}", "gpu.flops is unknown; known: name, memory_gib"),
        ("assumptions: {overlap: much}", "assumptions.overlap: expected a number, got 'much'"),
        ("assumptions: {overlap: -1}", "assumptions.overlap: expected 0 or more"),
        ("network: 1", "expected the sections gpu and assumptions"),
        ("gpu: 3", "gpu: expected fields with numbers"),
    ],
)
def test_rates_that_are_refused(
    text: str,
    message: str,
    config_30b: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = tmp_path / "rates.yaml"
    rates.write_text(text)
    given = ["plan", FLAGSHIP, "--model-config", config_30b, "--rates", str(rates)]
    assert main(given) == 2
    assert message in capsys.readouterr().err


def test_a_run_on_cpu_has_memory_but_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | {"num_hidden_layers": 2}))
    quickstart = str(RECIPES / "quickstart.yaml")
    code, report = _json(capsys, quickstart, "--set", f"model.path={tmp_path}")
    assert code == 0 and report["times"] == []
    assert report["memory"]["placement"] == "own process"
    assert report["memory"]["kv_cache"] == 2**30
