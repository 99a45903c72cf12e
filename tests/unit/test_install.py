# SPDX-License-Identifier: Apache-2.0
"""The installed project, seen from outside the repository."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))


def run_elsewhere(code: str, folder: Path, **variables: str) -> list[str]:
    """The lines that a fresh interpreter prints, started in a folder that is not the repository."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_megatron_core_and_this_project_share_a_namespace(tmp_path: Path) -> None:
    # megatron.training swallows any ImportError of megatron.rl.rl_utils; the flag tells.
    code = """
import megatron.core, megatron.training.training, megatron.rl.rl_utils, pdm
print(megatron.training.training.has_rl_utils)
print(getattr(megatron, "__file__", None))
"""
    assert run_elsewhere(code, tmp_path)[-2:] == ["True", "None"]


def test_importing_pdm_loads_torch_and_nothing_of_the_trainer(tmp_path: Path) -> None:
    # torch may load triton itself, so that what torch brings is taken off first.
    code = """
import sys, torch
before = set(sys.modules)
import pdm
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"torch", "pdm"}))
print(sorted({"megatron", "vllm", "transformers"} & set(sys.modules)))
"""
    assert run_elsewhere(code, tmp_path) == ["[]", "[]"]


def requirement_lines(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_requirements_name_no_host(path: Path) -> None:
    # Comments as well: where packages come from is the reader's own configuration.
    text = path.read_text()
    assert "://" not in text
    assert not re.search(r"(?m)^\s*-", text), "options (an index, links, other files) do not belong"
    for line in requirement_lines(path):
        assert "@" not in line and re.match(r"^[A-Za-z0-9._-]+(\[[\w,-]+\])?(==| ;)", line), line


def test_pins_agree() -> None:
    pins: dict[str, set[str]] = {}
    for path in REQUIREMENTS:
        for line in requirement_lines(path):
            name, _, version = line.partition("==")
            if version:
                pins.setdefault(re.sub(r"\[.*\]", "", name).lower(), set()).add(version)
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}


def test_pins_live_in_requirements_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.6"], "pdm needs torch only, and any recent one"
    assert "optional-dependencies" in project["dynamic"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes into the tree that it builds from."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("pdm", "pdm_rl", "megatron", "requirements"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    *_, name = run_elsewhere(code, source)
    return source.parent / name


@pytest.mark.slow
def test_what_a_wheel_holds(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pdm").rglob("*.py")}
    for package in ("pdm_rl", "megatron"):
        expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
    assert expected <= set(names)
    assert "megatron/__init__.py" not in names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"pdm", "pdm_rl", "megatron"}


@pytest.mark.slow
def test_a_regular_install_shares_the_namespace_too(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """
import megatron.core, megatron.training.training, megatron.rl, pdm
print(megatron.training.training.has_rl_utils)
print(megatron.rl.__file__)
print(pdm.__file__)
"""
    flag, *files = run_elsewhere(code, tmp_path, PYTHONPATH=str(tmp_path / "site"))[-3:]
    assert flag == "True"
    assert all(Path(file).is_relative_to(tmp_path / "site") for file in files), files
