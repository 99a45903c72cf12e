# SPDX-License-Identifier: Apache-2.0
"""Responses of an evaluation, saved as they come and found again by one that continues it.

A JSON line a response. All samples of a problem are appended at once and reach the disk before
anything else is written, so that a process killed at any moment leaves whole problems and at most
one torn one at the end, which is cut off by the next to open the file.
"""

import dataclasses
import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron.rl.errors import UserError


@dataclass(frozen=True)
class Response:
    """One sample.

    bench, problem, sample: which; problems count from 0 in the order of the benchmark's file.
    tokens: of the response, the one that ended it included. finished: False, it was cut.
    score: in [0, 1]. answer: as extracted, in canonical form; None: there is none.
    gold: the right answer, where the task states one. text: without the token that ended it.
    unscored: how many samples of the problem could not be scored (too slow, or the scorer failed)
    and have score 0 for that, the same number in each of them.
    """

    bench: str
    problem: int
    sample: int
    tokens: int
    finished: bool
    score: float
    answer: str | None
    gold: str | None
    unscored: int
    text: str


class ResponseFile:
    """The file of an evaluation, open for appending, and locked: it has one writer.

    Attributes:
        done: the samples of each problem, by (bench, problem).

    Args:
        path: made when it is not there.
        samples: of every problem.

    Raises:
        UserError: another process writes to it, or it is not such a file.
    """

    def __init__(self, path: Path, samples: int) -> None:
        self._samples = samples
        self.done: dict[tuple[str, int], tuple[Response, ...]] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise UserError(
                f"{path} is being written by another evaluation; wait for it, or name another --out"
            ) from None
        try:
            self._recover(path)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, samples: Sequence[Response]) -> None:
        """Save all samples of a problem."""
        assert len(samples) == self._samples, "a problem is saved whole"
        lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) for one in samples]
        data = memoryview(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)
        self.done[samples[0].bench, samples[0].problem] = tuple(samples)

    def close(self) -> None:
        """Close the file and give up the lock."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _recover(self, path: Path) -> None:
        """Read the whole problems and cut off what is behind them."""
        whole = 0
        with path.open("rb") as file:
            for lines in itertools.batched(file, self._samples):
                if len(lines) < self._samples or not lines[-1].endswith(b"\n"):
                    break  # torn, and by that the last
                samples = tuple(_parse(line, path, whole) for line in lines)
                self._check(samples, path, whole)
                self.done[samples[0].bench, samples[0].problem] = samples
                whole += sum(map(len, lines))
        os.ftruncate(self._fd, whole)

    def _check(self, samples: Sequence[Response], path: Path, offset: int) -> None:
        found = [(one.bench, one.problem, one.sample) for one in samples]
        first = samples[0]
        if found != [(first.bench, first.problem, number) for number in range(self._samples)]:
            raise UserError(
                f"{path}: expected {self._samples} samples of one problem from byte {offset} on, "
                f"found {found}; it was sampled otherwise or edited, name another --out"
            )


def read_responses(path: Path) -> Iterator[Response]:
    """Yield the responses of a finished evaluation."""
    with path.open("rb") as file:
        for line in file:
            yield _parse(line, path, 0)


def _parse(line: bytes, path: Path, offset: int) -> Response:
    try:
        return Response(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path}: no response from byte {offset} on ({error}); it was edited or is no file of "
            "an evaluation, name another --out"
        ) from None
