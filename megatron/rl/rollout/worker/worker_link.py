# SPDX-License-Identifier: Apache-2.0
"""The worker's end of the connection: a thread that reads, a thread that writes.

The engine's loop runs in the main thread and must neither wait for a slow reader before its queue
is full, nor miss an `abort` while it samples.
"""

import queue
import threading
from typing import Any

from ..wire import Channel, Message, WireError

# Messages that may wait for the client. A part of an answer is a few MiB.
MAX_WAITING_MESSAGES = 8
_CHECK_S = 0.1


class WorkerLink:
    """Commands in, answers out, and whether the running command was aborted."""

    def __init__(self, channel: Channel, send_timeout_s: float) -> None:
        self._channel = channel
        self._send_timeout_s = send_timeout_s
        self._commands: queue.SimpleQueue[Message | WireError] = queue.SimpleQueue()
        self._answers: queue.Queue[Message] = queue.Queue(MAX_WAITING_MESSAGES)
        self._send_error: WireError | None = None
        self._aborted: Any = None
        for name, target in (("read-commands", self._read), ("write-answers", self._write)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def receive(self) -> Message:
        """The next command. Raises WireError when the client is gone."""
        command = self._commands.get()
        if isinstance(command, WireError):
            raise command
        return command

    def send(self, message: Message) -> None:
        """Queue an answer; wait while the client does not read what is queued already.

        Raises WireError once a send has failed, WireTimeout where the client took no byte for
        the time allowed.
        """
        while True:
            self._check()
            try:
                return self._answers.put(message, timeout=_CHECK_S)
            except queue.Full:
                continue

    def flush(self) -> None:
        """Wait until every answer has been written."""
        with self._answers.all_tasks_done:
            while self._answers.unfinished_tasks:
                self._check()
                self._answers.all_tasks_done.wait(_CHECK_S)

    def aborted(self, request_id: Any) -> bool:
        """Whether the client has asked to abort this command."""
        return self._aborted is not None and self._aborted == request_id

    def _check(self) -> None:
        if self._send_error is not None:
            raise self._send_error

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive(timeout_s=None)
            except Exception as error:
                self._commands.put(_as_wire_error(error))
                return
            if message.kind == "abort":
                self._aborted = message.fields.get("request")
            else:
                self._commands.put(message)

    def _write(self) -> None:
        while True:
            message = self._answers.get()
            try:
                self._channel.send(message, self._send_timeout_s)
            except Exception as error:
                self._send_error = _as_wire_error(error)
                return
            self._answers.task_done()


def _as_wire_error(error: Exception) -> WireError:
    """What ends a thread has to end the worker: it would look alive and be silent for ever."""
    return error if isinstance(error, WireError) else WireError(f"{type(error).__name__}: {error}")
