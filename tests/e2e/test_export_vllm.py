# SPDX-License-Identifier: Apache-2.0
"""Exported checkpoints in vLLM: block FP8 in its model class, BF16 in a running engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.rl.cli import main
from tests.checkpoints import QWEN3, QWEN3_MOE, WHOLE_BLOCKS, write_checkpoint

SIZES = WHOLE_BLOCKS | {"eos_token_id": 0, "bos_token_id": 0}
CONFIGS = {"dense": QWEN3 | SIZES, "moe": QWEN3_MOE | SIZES}
PROMPT = [7, 300, 21, 150, 4]
VLLM_TIMEOUT_S = 300.0

pytestmark = pytest.mark.engine


def in_vllm(*arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.e2e.export_in_vllm", *arguments],
        capture_output=True,
        text=True,
        timeout=VLLM_TIMEOUT_S,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("kind", ["moe", pytest.param("dense", marks=pytest.mark.slow)])
def test_vllm_takes_every_block_fp8_tensor(tmp_path: Path, kind: str) -> None:
    source = write_checkpoint(tmp_path / "source", CONFIGS[kind])
    out = str(tmp_path / "out")
    assert main(["export", str(source), "--out", out, "--format", "block_fp8"]) == 0
    loaded = in_vllm("load", out)
    assert loaded["method"] == "fp8"
    assert loaded["different"] == []
    for name, dtype in loaded["dtypes"].items():
        if name.endswith("_scale_inv"):
            expected = "torch.float32"
        elif any(part in name for part in ("_proj.", "_experts.")):
            expected = "torch.float8_e4m3fn"
        else:
            expected = "torch.bfloat16"
        assert dtype == expected, name
    layers = CONFIGS[kind]["num_hidden_layers"]
    assert sum("float8" in dtype for dtype in loaded["dtypes"].values()) == 4 * layers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_vllm_generates_from_a_bf16_export(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    source = write_checkpoint(tmp_path / "source", CONFIGS[kind])
    out = str(tmp_path / "out")
    assert main(["export", str(source), "--out", out, "--format", "bf16"]) == 0
    generated = in_vllm("generate", out, json.dumps(PROMPT))
    assert generated["dtype"] == "torch.bfloat16"
    # float32 arithmetic on the same bfloat16 weights: the engine's own rounding is what remains,
    # up to 0.09 nats in a dense model; a router that picks another expert moves a token by more.
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.tensor([PROMPT + generated["tokens"]])
    with torch.no_grad():
        log_probs = model(tokens).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    own = log_probs.gather(1, tokens[0, len(PROMPT) :, None])[:, 0]
    deviations = (own - torch.tensor(generated["log_probs"])).abs()
    assert float(deviations.median()) < 0.1
    assert float((log_probs.max(1).values - own).median()) < 0.1
