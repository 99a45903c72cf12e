# SPDX-License-Identifier: Apache-2.0
"""What a run tells its user, as small JSON events from the ranks to whoever draws them.

The launcher gives every rank the write end of one pipe; its lines are shorter than PIPE_BUF, so
that those of several ranks never mix. Without a launcher (under torchrun or Slurm) rank 0 draws its
own events.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

EVENTS_FD_VARIABLE = "PDM_RL_EVENTS_FD"
# A line longer than this may be torn when several ranks write at once (PIPE_BUF on Linux).
MAX_LINE_BYTES = 4096
_MAX_MESSAGE_CHARS = 2500

Event = dict[str, Any]


class EventSink:
    """Sends events of one rank.

    Kinds: ``phase`` (name), ``note`` (message), ``progress`` (rollout, rollouts, metrics),
    ``error`` (message, exit_code, rank), ``done`` (message).
    """

    def __init__(self, rank: int, draw: Callable[[Event], None] | None = None) -> None:
        self._rank = rank
        self._draw = draw
        descriptor = os.environ.get(EVENTS_FD_VARIABLE)
        self._fd = int(descriptor) if descriptor is not None else None

    def send(self, kind: str, **content: Any) -> None:
        event: Event = {"kind": kind, "rank": self._rank} | content
        if "message" in event:
            event["message"] = str(event["message"])[:_MAX_MESSAGE_CHARS]
        if self._fd is not None:
            line = (json.dumps(event) + "\n").encode()
            assert len(line) <= MAX_LINE_BYTES or kind != "error"
            os.write(self._fd, line)
        elif self._draw is not None:
            self._draw(event)
        elif kind == "error":
            print(f"error: {event['message']}", file=sys.stderr)


def parse_events(buffer: bytearray) -> list[Event]:
    """Take the whole lines out of ``buffer`` and return their events."""
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    return [json.loads(line) for line in lines if line.strip()]
