# SPDX-License-Identifier: Apache-2.0
"""One starting policy and one finished run, which several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.resuming import succeed, write_config
from tests.e2e.runs import Run, start
from tools.make_tiny_model import TinyModelSettings, make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder, TinyModelSettings(steps=0), say=lambda text: None)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Run, str]:
    """A recorded run to its end, in which most tokens are outside the trust region after a step."""
    run = start(tmp_path_factory.mktemp("run"), model, ["records.write=true"])
    code, output = run.wait()
    assert code == 0, output
    return run, output


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of an uninterrupted run that saves itself and records its rollouts."""
    folder = tmp_path_factory.mktemp("sampled")
    config = write_config(folder / "config.yaml", model, records={"write": True})
    succeed("train", config, "--run-folder", folder / "run")
    return folder / "run"
