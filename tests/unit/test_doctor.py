# SPDX-License-Identifier: Apache-2.0
"""`pdm-rl doctor` beside a folder that looks like a source checkout of Megatron-LM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "megatron" / "rl" / "doctor.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A `megatron.rl` of its own, and a package that only this folder has."""
    folder = tmp_path / "Megatron-LM"
    for package in ("rl", "only_here"):
        (folder / "megatron" / package).mkdir(parents=True)
        (folder / "megatron" / package / "__init__.py").write_text("")
    (folder / "megatron" / "rl" / "rl_utils.py").write_text("theirs = True\n")
    return folder


def run(arguments: list[str], *path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_what_is_active_here() -> None:
    result = run(["-m", "megatron.rl.cli", "doctor"], ROOT)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"megatron.rl: {ROOT / 'megatron/rl/__init__.py'}" in lines
    assert "megatron.training.training.has_rl_utils: True" in lines
    assert any(line.startswith("megatron-core 0.19") for line in lines)
    (training,) = [line for line in lines if line.startswith("megatron.training: ")]
    assert training.endswith("megatron/training/__init__.py")


def test_another_megatron_rl_in_front_is_named(checkout: Path) -> None:
    result = run([str(DOCTOR)], checkout, ROOT)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    theirs = checkout / "megatron" / "rl" / "__init__.py"
    assert line.startswith(f"error: another megatron.rl is active, {theirs}")
    assert f"PYTHONPATH={ROOT}:" in line
    assert "has_rl_utils: None" in result.stdout, "a stranger's code is not run"


def test_a_checkout_behind_this_project_is_merged_with_it(checkout: Path) -> None:
    code = "import megatron.core, megatron.only_here, megatron.rl.rl_utils as u; print(u.__file__)"
    result = run(["-c", code], ROOT, checkout)
    assert result.stdout.split() == [str(ROOT / "megatron/rl/rl_utils.py")], result.stderr
    assert run([str(DOCTOR)], ROOT, checkout).returncode == 0
    theirs = run(["-c", code], checkout, ROOT)
    assert theirs.stdout.split() == [str(checkout / "megatron/rl/rl_utils.py")]


def test_a_regular_package_hides_the_namespace(checkout: Path) -> None:
    (checkout / "megatron" / "__init__.py").write_text("")
    result = run([str(DOCTOR)], checkout, ROOT)
    assert result.returncode == 1
    assert "makes megatron a regular package" in result.stderr
