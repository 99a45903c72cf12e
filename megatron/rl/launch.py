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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron.rl.config import Config
from megatron.rl.display import Display
from megatron.rl.events import EVENTS_FD_VARIABLE, Event, parse_events
from megatron.rl.rank import ALLOW_CHANGED, EXIT_UNSAVED
from megatron.rl.run_folder import OpenRun, how_to_continue
from megatron.rl.stop_request import STOP_SIGNALS

# After one rank failed, the others get this long to report or finish before they are ended.
FAILURE_GRACE_S = 3.0
# Between SIGINT and SIGKILL, where nothing is to be saved any more.
TERMINATE_GRACE_S = 8.0
# After a request to stop, ranks finish their step and save; after so long they are ended.
STOP_LIMIT_S = 900.0
# After one rank has waited in vain, the others that did have so long to say so.
HANG_GRACE_S = 20.0
POLL_S = 0.2
MAX_LAST_WORDS = 500


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path


class _Interrupted(Exception):
    def __init__(self, signum: int) -> None:
        self.signum = signum


@dataclass
class _Signals:
    """Whether this process was asked to stop; SIGINT raises.

    Schedulers and scripts around this process may each send SIGTERM: the second one says nothing
    new.
    """

    stop: bool = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            raise _Interrupted(signum)
        self.stop = True


def launch(config: Config, run: OpenRun, *, allow_changed: bool = False) -> int:
    """Run ``config`` in an open folder with one process a rank; return the exit code.

    SIGTERM and SIGUSR1 have the ranks save and stop; SIGINT ends them at once.
    0: the run ended, or stopped and saved. 1: it failed. 2: the user has something to mend.
    128 + n: ended by signal n. In every case no process of the run is left.
    """
    folder = run.path
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pdm-rl-") as private, Display() as display:
        ranks: list[_Rank] = []
        try:
            with _handled_signals() as signals:
                arguments = [str(folder), *([ALLOW_CHANGED] if allow_changed else [])]
                descriptors = [write_fd, *([run.lock.descriptor] if run.lock else [])]
                for number in range(config.parallel.world_size):
                    environment = _environment(number, config, Path(private), write_fd)
                    log = logs / f"rank{number}.log"
                    ranks.append(_start(number, arguments, environment, log, descriptors))
                os.close(write_fd)
                return _Watch(ranks, folder, read_fd, display).until_over(signals)
        except _Interrupted as interruption:
            message = f"stopped; what was written is in {folder}; {how_to_continue(folder)}"
            display.draw({"kind": "note", "message": message})
            return 128 + interruption.signum
        finally:
            _end(ranks)
            os.close(read_fd)


def _environment(number: int, config: Config, private: Path, write_fd: int) -> dict[str, str]:
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
    return environment


def _start(
    number: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    path: Path,
    descriptors: Sequence[int],
) -> _Rank:
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron.rl.rank", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(descriptors),
            # Ctrl-C reaches this process only, which then ends the ranks in order.
            start_new_session=True,
        )
    return _Rank(number, process, path)


class _Watch:
    """Draws what the ranks report until the run is over."""

    def __init__(self, ranks: list[_Rank], folder: Path, read_fd: int, display: Display) -> None:
        os.set_blocking(read_fd, False)
        self._ranks = ranks
        self._folder = folder
        self._read_fd = read_fd
        self._display = display
        self._buffer = bytearray()
        self._error: Event | None = None
        self._reported: set[int] = set()
        self._failed_at: float | None = None
        self._stopping_at: float | None = None

    def until_over(self, signals: _Signals) -> int:
        """Return the exit code once every rank has ended, or one has failed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            while True:
                selector.select(POLL_S)
                # Before the events: of a rank that has ended, all of them are there.
                codes = [rank.process.poll() for rank in self._ranks]
                self._draw_events()
                if all(code in (0, EXIT_UNSAVED) for code in codes):
                    return max(code or 0 for code in codes)
                if signals.stop and (code := self._stop(codes)) is not None:
                    return code
                if (error := self._failure(codes)) is not None:
                    self._display.draw(error)
                    return int(error["exit_code"])

    def _draw_events(self) -> None:
        for event in _read_events(self._read_fd, self._buffer):
            if event["kind"] == "error":
                self._error = self._error or event
                self._reported.add(event["rank"])
            else:
                self._display.draw(event)

    def _stop(self, codes: Sequence[int | None]) -> int | None:
        """Have the ranks stop; return the exit code once they have."""
        now = time.monotonic()
        if self._stopping_at is None:
            self._stopping_at = now
            _signal(self._ranks, signal.SIGTERM)
        if -signal.SIGTERM in codes:  # so early that a rank did not listen yet: nothing to save
            return 0
        if now - self._stopping_at > STOP_LIMIT_S:
            message = f"the ranks did not stop in {STOP_LIMIT_S:.0f} s"
            message += f"; {how_to_continue(self._folder)}"
            self._display.draw({"kind": "error", "message": message})
            return 1
        return None

    def _failure(self, codes: Sequence[int | None]) -> Event | None:
        """Return what the user is told once a rank has failed, and it is clear which was first."""
        states = list(zip(self._ranks, codes, strict=True))
        failed = [(rank, code) for rank, code in states if code not in (None, 0, EXIT_UNSAVED)]
        if not failed:
            return None
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        for_s = now - self._failed_at
        silent = [rank for rank, code in failed if rank.number not in self._reported]
        killed = [rank for rank in silent if (rank.process.returncode or 0) < 0]
        if killed:  # what the others report follows from that
            return self._unreported(killed[0])
        if self._error is not None:
            hanging = [r for r, code in states if code is None and r.number not in self._reported]
            if not hanging or not _is_timeout(self._error):
                return self._error
            return _with_hanging(self._error, hanging) if for_s > HANG_GRACE_S else None
        if for_s > FAILURE_GRACE_S or all(code is not None for code in codes):
            return self._unreported(silent[0])
        return None

    def _unreported(self, rank: _Rank) -> Event:
        """Describe a rank that ended without a word, such as one that was killed."""
        code = rank.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        lines = [line for line in rank.log.read_text(errors="replace").splitlines() if line.strip()]
        last = f"; its last words: {lines[-1][:MAX_LAST_WORDS]}" if lines else ""
        message = f"rank {rank.number} {how}{last} (log: {rank.log})"
        message += f"; {how_to_continue(self._folder)}"
        return {"kind": "error", "message": message, "exit_code": 1}


def _is_timeout(error: Event) -> bool:
    """Whether a rank waited in vain for another: gloo's and NCCL's words."""
    return "timed out" in error["message"].lower()


def _with_hanging(error: Event, ranks: Sequence[_Rank]) -> Event:
    names = ", ".join(str(rank.number) for rank in ranks)
    message = f"rank {names} hangs: it did not come to where the others waited. {error['message']}"
    return error | {"message": message}


def _signal(ranks: Sequence[_Rank], signum: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signum)


def _read_events(read_fd: int, buffer: bytearray) -> list[Event]:
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(read_fd, 65536):
            buffer += chunk
            if len(chunk) < 65536:
                break
    return parse_events(buffer)


def _end(ranks: list[_Rank]) -> None:
    """End every rank that still runs, and all that it started."""
    _signal(ranks, signal.SIGINT)
    deadline = time.monotonic() + TERMINATE_GRACE_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()


@contextlib.contextmanager
def _handled_signals() -> Iterator[_Signals]:
    """Note requests to stop, and turn those to end into an exception in the main thread."""
    signals = _Signals()
    handled = (signal.SIGINT, *STOP_SIGNALS)
    for signum in handled:
        signal.signal(signum, signals.handle)
    try:
        yield signals
    finally:
        # A second Ctrl-C must not cut the clean-up short.
        for signum in handled:
            signal.signal(signum, signal.SIG_IGN)
