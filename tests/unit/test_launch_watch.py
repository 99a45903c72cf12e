# SPDX-License-Identifier: Apache-2.0
"""How the launcher sees that ranks have ended, whoever told them to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest

from megatron.rl.display import Display
from megatron.rl.launch import _Rank, _Signals, _Watch
from megatron.rl.rank import EXIT_UNSAVED


@pytest.fixture(autouse=True)
def no_endless_watch() -> Iterator[None]:
    def fail(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("the launcher does not see that the ranks have ended")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def watch(folder: Path, codes: Sequence[int]) -> int:
    """Watch ranks that end with these codes; they report nothing."""
    ranks = []
    for number, code in enumerate(codes):
        (log := folder / f"rank{number}.log").write_text("last words\n")
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
        ranks.append(_Rank(number, process, log))
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    try:
        with Display() as display:
            return _Watch(ranks, folder, read_fd, display).until_over(_Signals())
    finally:
        os.close(read_fd)
        for rank in ranks:
            rank.process.wait()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((EXIT_UNSAVED, EXIT_UNSAVED), EXIT_UNSAVED), ((0, 3), 1)],
)
def test_the_exit_code(
    tmp_path: Path, codes: Sequence[int], expected: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler may signal ranks and not the launcher, which then only sees them end."""
    assert watch(tmp_path, codes) == expected
    shown = "".join(capfd.readouterr())
    assert ("rank 1 ended with code 3; its last words: last words" in shown) == (expected == 1)
