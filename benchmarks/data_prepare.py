# SPDX-License-Identifier: Apache-2.0
"""Rows a second and memory of ``pdm-rl data prepare`` where each problem is there 100 times.

    python benchmarks/data_prepare.py [--json PATH]    the numbers
    python benchmarks/data_prepare.py --check          `name value target ok|short` lines

The file has the size and the layout of DAPO-Math-17k as published: 1.8 million rows, 18,000
problems, made from a seed in a temporary folder. The command runs in a process of its own, whose
whole time counts, start included.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import describe_environment
from benchmarks.targets import Target, as_json
from tests.duplicated_problems import Published, write_published

CONTENT = Published(good=17_000, conflicting=200, unanswered=100, fractions=700)
COPIES = 100
SEED = 1
MIN_ROWS_PER_S = 100_000
MAX_PEAK_BYTES = 1 << 30
# The peak is read by the process itself, in KiB: what the system reports of a child (ru_maxrss)
# begins with the memory of the parent that started it.
COMMAND = """
import sys
from megatron.rl.cli import main
code = main(sys.argv[1:])
print(open("/proc/self/status").read())
sys.exit(code)
"""


@dataclass(frozen=True)
class Measured:
    """One run of the command; ``kept`` problems of ``rows`` rows."""

    rows: int
    kept: int
    file_bytes: int
    seconds: float
    peak_bytes: int

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def measure(copies: int) -> Measured:
    """Make the file, prepare it, check the counts.

    Raises:
        RuntimeError: the command failed, or kept other problems than the good ones.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "published.parquet", Path(scratch) / "out"
        rows = write_published(source, CONTENT, copies, SEED)
        arguments = ["data", "prepare", str(source), "--out", str(out), "--answers", "integer"]
        started = time.perf_counter()
        process = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - started
        if process.returncode != 0:
            raise RuntimeError(f"pdm-rl data prepare failed: {process.stderr}")
        peak_bytes = int(process.stdout.rpartition("VmHWM:")[2].split()[0]) * 1024
        kept = json.loads((out / "card.json").read_text())["counts"]["kept"]
        if kept != CONTENT.good:
            raise RuntimeError(f"expected {CONTENT.good} problems to be kept, got {kept}")
        return Measured(rows, kept, source.stat().st_size, seconds, peak_bytes)


def targets(measured: Measured) -> list[Target]:
    """Return the limits that the command should keep."""
    return [
        Target("data_prepare_rows_per_s", measured.rows_per_s, MIN_ROWS_PER_S, at_least=True),
        Target("data_prepare_peak_bytes", measured.peak_bytes, MAX_PEAK_BYTES),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the numbers there")
    parser.add_argument("--copies", type=int, default=COPIES, help=f"default: {COPIES}")
    options = parser.parse_args()
    environment = describe_environment()
    measured = measure(options.copies)
    reached = targets(measured)
    if options.json is not None:
        report = {
            "environment": environment,
            "content": dataclasses.asdict(CONTENT) | {"copies": options.copies, "seed": SEED},
            "measured": dataclasses.asdict(measured) | {"rows_per_s": measured.rows_per_s},
            "targets": as_json(reached),
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.check:
        for target in reached:
            print(target.line())
        return 0 if all(target.met for target in reached) else 1
    print(
        f"{measured.rows:,} rows ({measured.file_bytes / 1e6:,.0f} MB), {measured.kept:,} kept: "
        f"{measured.seconds:.1f} s, {measured.rows_per_s:,.0f} rows/s, peak "
        f"{measured.peak_bytes / 1e6:,.0f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
