# SPDX-License-Identifier: Apache-2.0
"""Start a run's ranks on this machine, draw what they report, and end them all together."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron.rl.config import Config
from megatron.rl.display import Display
from megatron.rl.events import EVENTS_FD_VARIABLE, Event, parse_events

# After one rank failed, the others get this long to report or finish before they are ended.
FAILURE_GRACE_S = 3.0
# Between SIGTERM and SIGKILL.
TERMINATE_GRACE_S = 8.0
POLL_S = 0.2


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path


class _Interrupted(Exception):
    def __init__(self, signum: int) -> None:
        self.signum = signum


def launch(config: Config, folder: Path) -> int:
    """Run ``config`` in ``folder`` with one process a rank; return the exit code.

    0: the run ended. 1: it failed. 2: the user has something to mend. 128 + n: ended by signal n.
    In every case no process of the run is left.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pdm-rl-") as private, Display() as display:
        ranks: list[_Rank] = []
        try:
            with _raising_signals():
                for number in range(config.parallel.world_size):
                    ranks.append(_start(number, config, folder, logs, Path(private), write_fd))
                os.close(write_fd)
                return _watch(ranks, read_fd, display)
        except _Interrupted as interruption:
            display.draw({"kind": "note", "message": f"stopped; what was written is in {folder}"})
            return 128 + interruption.signum
        finally:
            _end(ranks)
            os.close(read_fd)


def _start(
    number: int, config: Config, folder: Path, logs: Path, private: Path, write_fd: int
) -> _Rank:
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(config.parallel.world_size),
        "LOCAL_WORLD_SIZE": str(config.parallel.world_size),
        "PDM_RL_STORE": str(private / "store"),
        EVENTS_FD_VARIABLE: str(write_fd),
        # All ranks are on this machine: gloo listens on the loopback interface only.
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    if config.run.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = logs / f"rank{number}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron.rl.rank", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            # Ctrl-C reaches this process only, which then ends the ranks in order.
            start_new_session=True,
        )
    return _Rank(number, process, path)


def _watch(ranks: list[_Rank], read_fd: int, display: Display) -> int:
    """Draw events until every rank has ended, or one has failed; return the exit code."""
    os.set_blocking(read_fd, False)
    buffer = bytearray()
    error: Event | None = None
    failed_at: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(read_fd, selectors.EVENT_READ)
        while True:
            selector.select(POLL_S)
            for event in _read_events(read_fd, buffer):
                if event["kind"] == "error":
                    error = error or event
                else:
                    display.draw(event)
            codes = [rank.process.poll() for rank in ranks]
            if all(code == 0 for code in codes):
                return 0
            now = time.monotonic()
            if failed_at is None and any(code not in (None, 0) for code in codes):
                failed_at = now
            all_ended = all(code is not None for code in codes)
            if failed_at is not None and (all_ended or error or now - failed_at > FAILURE_GRACE_S):
                error = error or _unreported(ranks)
                display.draw(error)
                return int(error["exit_code"])


def _read_events(read_fd: int, buffer: bytearray) -> list[Event]:
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(read_fd, 65536):
            buffer += chunk
            if len(chunk) < 65536:
                break
    return parse_events(buffer)


def _unreported(ranks: list[_Rank]) -> Event:
    """Describe a rank that ended without a word, such as one that was killed."""
    rank = next(rank for rank in ranks if rank.process.poll() not in (None, 0))
    code = rank.process.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    lines = [line for line in rank.log.read_text(errors="replace").splitlines() if line.strip()]
    last = f"; its last words: {lines[-1]}" if lines else ""
    message = f"rank {rank.number} {how}{last} (log: {rank.log})"
    return {"kind": "error", "message": message, "exit_code": 1}


def _end(ranks: list[_Rank]) -> None:
    """End every rank that still runs, and all that it started."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    deadline = time.monotonic() + TERMINATE_GRACE_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()


@contextlib.contextmanager
def _raising_signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into an exception in the main thread."""

    def raise_interrupted(signum: int, frame: FrameType | None) -> None:
        raise _Interrupted(signum)

    previous = {s: signal.signal(s, raise_interrupted) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        # A second Ctrl-C must not cut the clean-up short.
        for s in previous:
            signal.signal(s, signal.SIG_IGN)
