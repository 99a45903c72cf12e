# SPDX-License-Identifier: Apache-2.0
"""A block FP8 export in transformers, which dequantises it on machines without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.rl.cli import main
from tests.checkpoints import QWEN3, QWEN3_MOE, WHOLE_BLOCKS, write_checkpoint

# transformers wants accelerate before it touches FP8; the trainer has no other use for it.
ACCELERATE = "accelerate==1.15.0"

# Every weight that transformers holds equals what an export to float32 says. The logits agree as
# well, so the names mean the same.
COMPARE = """
import sys, torch
from transformers import AutoModelForCausalLM
fp8, plain = (
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in sys.argv[1:]
)
left, right = fp8.state_dict(), plain.state_dict()
assert left.keys() == right.keys()
assert all(torch.equal(left[name], right[name]) for name in left)
tokens = torch.arange(32).reshape(2, 16)
assert torch.equal(fp8(tokens).logits, plain(tokens).logits)
print("equal", len(left))
"""


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("needs uv, to install accelerate in a temporary folder")
    folder = tmp_path_factory.mktemp("accelerate")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", folder, ACCELERATE]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
@pytest.mark.parametrize(
    "config", [QWEN3 | WHOLE_BLOCKS, QWEN3_MOE | WHOLE_BLOCKS], ids=["dense", "moe"]
)
def test_transformers_reads_block_fp8(
    tmp_path: Path, accelerate: Path, config: dict[str, object], scales: str
) -> None:
    source = write_checkpoint(tmp_path / "source", config)
    fp8, plain = str(tmp_path / "fp8"), str(tmp_path / "plain")
    arguments = ["--format", "block_fp8", "--scales", scales]
    assert main(["export", str(source), "--out", fp8, *arguments]) == 0
    assert main(["export", fp8, "--out", plain, "--format", "float32"]) == 0
    result = subprocess.run(
        [sys.executable, "-c", COMPARE, fp8, plain],
        env=os.environ | {"PYTHONPATH": str(accelerate)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.startswith("equal")
