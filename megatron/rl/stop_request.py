# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to stop: SIGTERM, as schedulers send it, or SIGUSR1.

The signal only sets a flag, which ranks agree on between two optimizer steps. Where a rank waits
for what a stop makes worthless (an engine that samples), it lets the signal interrupt it.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(BaseException):
    """The run is to stop. Not an Exception: nothing that handles errors may take it for one."""


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        requested: it was; this stays so.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = False

    def listen(self) -> None:
        """Take the signals over. In the main thread only."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._note)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise :exc:`Preempted` inside, at once when the request is there already."""
        self._interrupts = True
        try:
            if self.requested:
                raise Preempted
            yield
        finally:
            self._interrupts = False

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._interrupts:
            self._interrupts = False
            raise Preempted
