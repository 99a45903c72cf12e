# SPDX-License-Identifier: Apache-2.0
"""One target in a process of its own: ``python -m tools.fuzzing.child``; ../fuzz.py starts it.

Each fault is a line of JSON on standard output. The input at work is in a mapped file, so that the
parent knows it when this process hangs or crashes.
"""

import argparse
import json
import mmap
import random
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tools.fuzzing.guard import Guard
from tools.fuzzing.target import Target
from tools.fuzzing.targets import TARGETS

PROGRESS = struct.Struct("<qq")
"""Number of the input at work, and how many were accepted so far."""
MEMORY_BYTES = 12 << 30
MAX_FAULTS = 500


class Hang(BaseException):
    """An input took longer than its limit."""


def main() -> int:
    """Run the inputs ``[first, stop)``; return 1 where one of them is a fault."""
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("target", str), ("seed", int), ("first", int), ("stop", int), ("folder", Path)
    ):  # fmt: skip
        parser.add_argument(name, type=kind)
    options = parser.parse_args()
    area = options.folder / "area"
    area.mkdir(exist_ok=True)
    target = TARGETS[options.target]()
    target.prepare(area)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    progress_file = (options.folder / "progress").open("r+b")
    progress = mmap.mmap(progress_file.fileno(), PROGRESS.size)
    guard = Guard(area)
    _say({"enforced": guard.enforced})
    faults = accepted = 0
    for index in range(options.first, options.stop):
        PROGRESS.pack_into(progress, 0, index, accepted)
        rng = random.Random(f"{options.seed}/{options.target}/{index}")
        fault, took = _attempt(target, rng, guard)
        accepted += took
        if fault is not None:
            _say({"index": index, **fault})
            faults += 1
            if faults == MAX_FAULTS:
                break
    PROGRESS.pack_into(progress, 0, options.stop, accepted)
    target.close()
    return min(faults, 1)


def _attempt(
    target: Target, rng: random.Random, guard: Guard
) -> tuple[dict[str, str] | None, bool]:
    """Return the fault of one input, or whether it was accepted."""
    accepted = False
    unseen: list[BaseException] = []
    try:
        with _limit(target.limit_s), _background_errors(unseen):
            accepted = target.attempt(rng)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _described(error), False
    if unseen:
        return _described(unseen[0]), False
    if tried := guard.taken():
        return {"kind": "Forbidden", "message": tried[0], "place": "", "trace": ""}, False
    return None, accepted


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _background_errors(found: list[BaseException]) -> Iterator[None]:
    """Collect what threads and finalizers raise: it would be printed as a traceback."""

    def in_thread(what: threading.ExceptHookArgs) -> None:
        found.append(what.exc_value or RuntimeError(what.exc_type.__name__))

    def in_finalizer(what: "sys.UnraisableHookArgs") -> None:
        found.append(what.exc_value or RuntimeError(str(what.err_msg)))

    previous = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = in_thread, in_finalizer
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = previous


def _described(error: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/megatron/rl/" in frame.filename] or frames[-1:]
    place = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else ""
    trace = "".join(traceback.format_exception(error))[-3000:]
    name = type(error).__name__
    return {"kind": name, "message": str(error)[:300], "place": place, "trace": trace}


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
