#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Give damaged input to everything that reads what others wrote, and see that it is refused.

    PYTHONPATH=. .venv/bin/python tools/fuzz.py --inputs 100000

Configs and overrides, rollout records, checkpoint folders, responses to be scored, model folders
and files of problems. A fault is any exception but the one that tells the user what to mend, an
input that takes too long, a crash, and any attempt to write outside of the folder, to start a
program or to open a connection. Input number i of a target depends on the seed and on i alone:
``--target T --first I --inputs 1`` repeats it. Exit code 1 where there is a fault.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.fuzzing.targets import SHARES  # noqa: E402

POLL_S = 0.5
# No input of any target may take so long; a process that is stuck inside of a library is ended.
STUCK_S = 300.0
START_S = 300.0
MAX_CRASHES = 20


@dataclass
class Result:
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    enforced: bool = False
    faults: list[dict[str, Any]] = field(default_factory=list)


def main() -> int:
    """Run; return 0, or 1 where there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (default: 100000)")
    parser.add_argument("--target", choices=("all", *SHARES), default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write counts and faults there")
    options = parser.parse_args()
    counts = {options.target: options.inputs}
    if options.target == "all":
        whole = sum(SHARES.values())
        counts = {name: -(-options.inputs * share // whole) for name, share in SHARES.items()}
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(run_target, name, options.seed, options.first, options.first + count)
            for name, count in counts.items()
        ]
        results = [run.result() for run in runs]
    if options.json:
        Path(options.json).write_text(json.dumps([vars(result) for result in results], indent=1))
    total, faults = sum(r.inputs for r in results), sum(len(r.faults) for r in results)
    print(f"{total} inputs, {faults} faults")
    return min(faults, 1)


def run_target(name: str, seed: int, first: int, stop: int, *, quiet: bool = False) -> Result:
    """Run the inputs ``[first, stop)`` of one target, in processes of its own."""
    result, started, begun = Result(name), time.monotonic(), first
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while first < stop and len(result.faults) < MAX_CRASHES:
            first = _run_child(result, Path(folder), name, seed, first, stop, quiet)
    result.inputs, result.seconds = first - begun, time.monotonic() - started
    if not quiet:
        _report(result, seed)
    return result


def _run_child(
    result: Result, folder: Path, name: str, seed: int, first: int, stop: int, quiet: bool
) -> int:
    """Start a process; return the number of the input to go on with, when it ends or has to."""
    from tools.fuzzing.child import PROGRESS

    run = Path(tempfile.mkdtemp(dir=folder))
    elsewhere = run / "elsewhere"
    elsewhere.mkdir()
    progress, out, err = run / "progress", run / "out", run / "err"
    progress.write_bytes(PROGRESS.pack(first - 1, 0))
    with out.open("wb") as out_file, err.open("wb") as err_file:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tools.fuzzing.child", name, str(seed),
             str(first), str(stop), str(run)],
            cwd=elsewhere,
            env=os.environ | _environment(),
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
        )  # fmt: skip
        try:
            stuck = _wait(child, progress, None if quiet else (name, stop))
        finally:
            child.kill()
            child.wait()
    index, accepted = PROGRESS.unpack(progress.read_bytes())
    result.accepted += accepted
    for line in _lines(out):
        result.enforced |= bool(line.pop("enforced", False))
        result.faults += [line] if line else []
    if index == stop:
        return stop
    if child.returncode == 0 or (child.returncode == 1 and index >= first and not stuck):
        return index + 1  # it had faults enough
    how = "stuck" if stuck else f"ended with code {child.returncode}"
    trace = err.read_text(errors="replace")[-3000:]
    if index < first:
        raise RuntimeError(f"target {name} did not start ({how}):\n{trace}")
    result.faults.append({"index": index, "kind": how, "message": "", "place": "", "trace": trace})
    return index + 1


def _environment() -> dict[str, str]:
    return {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _wait(child: "subprocess.Popen[bytes]", progress: Path, shown: tuple[str, int] | None) -> bool:
    """Wait until it ends; return whether it makes no progress instead."""
    from tools.fuzzing.child import PROGRESS

    last, since, first = -2, time.monotonic(), None
    while child.poll() is None:
        try:
            child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            index, _ = PROGRESS.unpack(progress.read_bytes())
            first = index if first is None else first
            if shown is not None and sys.stderr.isatty():
                print(f"\r{shown[0]:10} {index}/{shown[1]} ", end="", file=sys.stderr)
            if index != last:
                last, since = index, time.monotonic()
            elif time.monotonic() - since > (START_S if index == first else STUCK_S):
                return True
    return False


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def _report(result: Result, seed: int) -> None:
    guard = "" if result.enforced else " (no Landlock: writes of libraries were not watched)"
    print(
        f"{result.target}: {result.inputs} inputs in {result.seconds:.0f} s, {result.accepted} "
        f"accepted, {len(result.faults)} faults{guard}",
        flush=True,
    )
    kinds = Counter((fault["kind"], fault["place"]) for fault in result.faults)
    for (kind, place), count in kinds.most_common():
        one = next(f for f in result.faults if (f["kind"], f["place"]) == (kind, place))
        print(f"  {count} x {kind} in {place}: {one['message'][:200]}")
        print(f"    tools/fuzz.py --target {result.target} --seed {seed} --first {one['index']} "
              "--inputs 1")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
