# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo ranks, one process each, and collect what they return."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 120.0
_POLL_S = 0.02
_GRACE_S = 1.0
"""How long the other ranks may go on after one has failed, to leave their own traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start_processes: bool = False,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on ``world_size`` fresh processes.

    Each has the default process group initialised (gloo, loopback, a file as the store) and one
    torch thread. ``function`` and ``args`` must be picklable, so the function is one at the top
    of a module; what it returns goes through ``torch.save``. Returns the results by rank.
    ``start_processes``: they may start processes through ``multiprocessing`` themselves, as
    Megatron's checkpoint writer does; these outlive a rank that has to be killed.

    Raises ``RuntimeError`` with the traceback of the rank that failed first, or ``TimeoutError``
    when they take longer than ``timeout_s``. No process outlives the call.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        processes = [
            context.Process(
                target=_run_rank,
                args=(rank, world_size, folder, timeout_s, function, args),
                name=f"rank {rank} of {world_size}",
                daemon=not start_processes,
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, timeout_s)
            exit_codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        _raise_failures(exit_codes, folder, timeout_s)
        return [
            torch.load(_result_file(folder, rank), weights_only=False) for rank in range(world_size)
        ]


def _run_rank(
    rank: int,
    world_size: int,
    folder: Path,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        torch.save(function(rank, world_size, *args), _result_file(folder, rank))
        # Leaving early would break a slower rank's last collective.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        _error_file(folder, rank).write_text(traceback.format_exc())
        sys.exit(1)


def _wait(processes: list[BaseProcess], timeout_s: float) -> None:
    """Wait until all are done, one has failed, or time is up."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.exitcode not in (None, 0) for process in processes):
            # Peers that wait for the failed rank would wait until the timeout.
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)


def _raise_failures(exit_codes: list[int | None], folder: Path, timeout_s: float) -> None:
    """Raise for what went wrong; an exit code of None is a rank that had to be stopped."""
    # The oldest traceback is the cause; later ones are of ranks that lost their peer.
    errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    world_size = len(exit_codes)
    if errors:
        rank = errors[0].name.removeprefix("error-")
        raise RuntimeError(f"rank {rank} of {world_size} failed:\n{errors[0].read_text()}")
    for rank, exit_code in enumerate(exit_codes):
        if exit_code not in (None, 0):
            raise RuntimeError(f"rank {rank} of {world_size} died with exit code {exit_code}")
    late = [rank for rank, exit_code in enumerate(exit_codes) if exit_code is None]
    if late:
        raise TimeoutError(f"ranks {late} of {world_size} did not return within {timeout_s} s")


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}"
