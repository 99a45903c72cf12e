# SPDX-License-Identifier: Apache-2.0
"""Start a run that is to be killed: as users do, or forked from a process that has imported all.

Importing torch and Megatron takes longer than a tiny run. A fork that has them goes through
``pdm-rl`` as under torchrun, where each rank is started by itself; there is no launcher then.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from tools.kills import stacks

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Started(Protocol):
    """A run under way.

    Attributes:
        output: what it prints.
    """

    output: Path

    def poll(self) -> int | None:
        """Return the exit code of the whole run once all its processes have ended."""
        ...

    def ranks(self) -> list[psutil.Process]:
        """Return the trainer's processes that there are by now, in order."""
        ...

    def everything(self) -> list[psutil.Process]:
        """Return all of its processes."""
        ...


@dataclass
class LaunchedRun:
    """``pdm-rl`` as users start it; it starts the ranks, and these the engine."""

    output: Path
    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def ranks(self) -> list[psutil.Process]:
        found = [p for p in self.everything() if "megatron.rl.rank" in _command(p)]
        return sorted(found, key=lambda p: p.pid)

    def everything(self) -> list[psutil.Process]:
        return _with_descendants([self.process.pid])


@dataclass
class ForkedRun:
    """Ranks that were forked; nobody ends the others when one has died."""

    output: Path
    pids: list[int]
    codes: dict[int, int] = field(default_factory=dict)

    def poll(self) -> int | None:
        for pid in self.pids:
            if pid not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        if len(self.codes) < len(self.pids):
            return None
        return next((code for code in self.codes.values() if code), 0)

    def ranks(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in self.pids if pid not in self.codes]

    def everything(self) -> list[psutil.Process]:
        return _with_descendants([pid for pid in self.pids if pid not in self.codes])


@dataclass(frozen=True)
class Starter:
    """Starts runs.

    Attributes:
        forked: see the module.
        num_ranks: of every run.
        folder: for output, stacks and temporary files.
    """

    forked: bool
    num_ranks: int
    folder: Path

    @property
    def stacks(self) -> Path:
        return self.folder / "stacks"

    def prepare(self) -> None:
        """Import all that a rank imports, if it is to be forked."""
        for name in ("stacks", "tmp", "output"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        os.environ |= self._environment()
        # That there is no GPU is nothing to warn of.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        if self.forked:
            _import_all()

    def start(self, arguments: Sequence[str], name: str) -> Started:
        """Start ``pdm-rl`` with these arguments."""
        output = self.folder / "output" / f"{name}.log"
        if not self.forked:
            site = str(stacks.site_folder(self.folder / "site"))
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([site, str(ROOT)])}
            with output.open("wb") as file:
                command = [sys.executable, "-m", "megatron.rl.cli", *arguments]
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return LaunchedRun(output, process)
        store = self.folder / "tmp" / f"store-{name}"
        store.unlink(missing_ok=True)
        output.write_bytes(b"")
        pids = []
        for rank in range(self.num_ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.num_ranks),
                "LOCAL_WORLD_SIZE": str(self.num_ranks),
                "PDM_RL_STORE": str(store),
            }
            pids.append(_fork(arguments, output, environment))
        return ForkedRun(output, pids)

    def _environment(self) -> dict[str, str]:
        return {
            stacks.FOLDER_VARIABLE: str(self.stacks),
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def _import_all() -> None:
    import torch
    import torch.utils.tensorboard
    import transformers

    import megatron.rl.run_checks
    import megatron.rl.trainer

    transformers.AutoTokenizer  # noqa: B018  # is imported when it is first looked up
    megatron.rl.run_checks, megatron.rl.trainer, torch.utils.tensorboard  # noqa: B018
    torch.set_num_threads(1)


def _fork(arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= environment
        stacks.answer()
        from megatron.rl.cli import main

        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _with_descendants(pids: Sequence[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found
