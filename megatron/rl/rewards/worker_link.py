# SPDX-License-Identifier: Apache-2.0
"""One scoring process, as its pool sees it: what was sent to it, and what it is busy with."""

import os
import time
from collections import deque
from dataclasses import dataclass

from megatron.rl.rewards.score import Score
from megatron.rl.rewards.scoring_wire import WireViolation, pack_request, take_result

_READ_BYTES = 1 << 16
# A fast scorer always finds the next response waiting; behind one that takes longer, responses
# would wait while other processes are idle.
_FAST_S = 0.005
_DEEP, _SHALLOW = 16, 1
# What `broken` says of a process that has ended, rather than sent what it should not.
ENDED = "ended"


@dataclass(frozen=True)
class Result:
    """The score of the response at `place` of its batch."""

    place: int
    score: Score


class WorkerLink:
    """Responses on their way to a process, in order; the first of them is the one being scored.

    Attributes:
        pid: the process.
        served: responses that it has scored.
        broken: why nothing can be expected of it any more; None while something can.
    """

    def __init__(self, pid: int, requests: int, results: int) -> None:
        self.pid = pid
        self.served = 0
        self.broken: str | None = None
        self._requests, self._results = requests, results
        os.set_blocking(requests, False)
        os.set_blocking(results, False)
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        # Places and tickets. A ticket is random, so that a process cannot answer by accident, or
        # for a response that it has not read.
        self._waiting: deque[tuple[int, int]] = deque()
        self._since = 0.0
        self._depth = _DEEP
        self._closed = False

    @property
    def results(self) -> int:
        """Descriptor that becomes readable when there is something to receive."""
        return self._results

    @property
    def requests(self) -> int:
        """Descriptor that becomes writable when there is room for what is unsent."""
        return self._requests

    @property
    def unsent(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._unsent)

    @property
    def waiting(self) -> list[int]:
        """Places of the responses without a score, the one being scored first."""
        return [place for place, _ in self._waiting]

    @property
    def load(self) -> int:
        """How many those are."""
        return len(self._waiting)

    def has_room(self, most_served: int) -> bool:
        """Whether to send another response, to a process that may score `most_served` of them."""
        return self.load < self._depth and self.served + self.load < most_served

    def deadline(self, timeout_s: float) -> float:
        """When the response that is being scored is out of time, by ``time.monotonic``."""
        return self._since + timeout_s

    def send(self, place: int, response: bytes, prompt: bytes) -> None:
        """Add a response; :meth:`flush` sends it."""
        if not self._waiting:
            self._since = time.monotonic()
        ticket = int.from_bytes(os.urandom(8), "little")
        self._waiting.append((place, ticket))
        self._unsent.append(memoryview(pack_request(ticket, response, prompt)))

    def flush(self) -> None:
        """Send as much as there is room for."""
        while self._unsent:
            parts = list(self._unsent)[:_DEEP]
            try:
                written = os.writev(self._requests, parts)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._unsent.clear()  # its end shows where its results are read
                return
            while written and written >= len(self._unsent[0]):
                written -= len(self._unsent.popleft())
            if written:
                self._unsent[0] = self._unsent[0][written:]

    def receive(self) -> list[Result]:
        """Return the scores that have arrived; none if there are none yet. Sets `broken`."""
        try:
            data = os.read(self._results, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self.broken = ENDED
            return []
        self._received += data
        found: list[Result] = []
        try:
            while self._waiting:
                score = take_result(self._received, self._waiting[0][1])
                if score is None:
                    break
                found.append(Result(self._waiting.popleft()[0], score))
        except WireViolation as violation:
            self.broken = str(violation)
        if self._received and not self._waiting:
            self.broken = "sent more than was asked for"
        if found:
            now = time.monotonic()
            self._depth = _DEEP if (now - self._since) / len(found) < _FAST_S else _SHALLOW
            self._since = now
            self.served += len(found)
        return found

    def close(self) -> None:
        """Close the pipes; an idle process then ends by itself."""
        if not self._closed:
            self._closed = True
            os.close(self._requests)
            os.close(self._results)
