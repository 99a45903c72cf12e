# SPDX-License-Identifier: Apache-2.0
"""Which tests run where: the tiers are markers, and pyproject.toml explains each."""

import os
from pathlib import Path

import pytest

# As in tools/test.sh, for those who call pytest directly. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# Tests in these folders carry the marker of the same name without saying so.
FOLDER_MARKERS = ("gpu", "engine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)

    if not _asked_for_by_name(config):
        _deselect(config, items, "slow")

    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def _asked_for_by_name(config: pytest.Config) -> bool:
    """--all, a marker expression, or a test's full name: then the slow ones are meant."""
    return bool(
        config.getoption("--all")
        or config.getoption("markexpr")
        or any("::" in argument for argument in config.args)
    )


def _deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    dropped = [item for item in items if item.get_closest_marker(marker)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
