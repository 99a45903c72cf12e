# SPDX-License-Identifier: Apache-2.0
"""The process that loads a task once and forks the processes that score.

    python -m megatron.rl.rewards.scoring_server FD PARENT

It talks with :mod:`~megatron.rl.rewards.scoring_client` over one end of a socket pair and listens
nowhere. It never touches a response, so it can be trusted: whether a scoring process has ended, and
why, is asked here. A process of its own rather than a fork of the trainer, which has threads,
accelerators and gigabytes.
"""

import contextlib
import gc
import json
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

from megatron.rl.errors import UserError
from megatron.rl.rewards.registry import make_task
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_worker import die_with_parent, enter_worker, run_worker
from megatron.rl.rewards.task import Task

# What the client sends: one command and a process id. FORK comes with two descriptors; END ends a
# process at once, REAP is for one that has closed its pipes.
COMMAND = struct.Struct("<cI")
FORK, END, REAP = b"F", b"E", b"R"
# What it gets: the new process, or the exit status of the ended one (negative: a signal).
ANSWER = struct.Struct("<i")
LENGTH = struct.Struct("<I")

_REAP_S = 0.2
_POLL_S = 0.002


def main(descriptor: int, parent: int) -> None:
    """Load the task that the client, a process ``parent``, names; serve it until it is gone."""
    # While it loads, which its parent waits for. Later the parent's end is the end of its socket:
    # the thread that started this may be gone long before.
    die_with_parent(True)
    if os.getppid() != parent:
        return  # it ended before that took effect
    with socket.socket(fileno=descriptor) as control:
        search_path = json.loads(_receive_frame(control))
        sys.path[:] = search_path
        spec, limits = pickle.loads(_receive_frame(control))
        try:
            task = make_task(spec)
        except UserError as error:
            _send_frame(control, {"error": str(error)})
            return
        report = _try_sandbox(limits)
        # Pages that a collection would write to stay shared with all forks.
        gc.collect()
        gc.freeze()
        die_with_parent(False)
        _send_frame(control, {"name": task.name, "sandbox": report})
        with contextlib.suppress(ConnectionError):
            _serve(control, task, limits)


def _serve(control: socket.socket, task: Task, limits: ScoringLimits) -> None:
    children: set[int] = set()
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 2, socket.MSG_WAITALL)
            if len(data) < COMMAND.size:
                return
            command, pid = COMMAND.unpack(data)
            if command == FORK:
                requests, results = descriptors
                answer = os.fork()
                if answer == 0:
                    control.close()
                    run_worker(task, limits, requests, results)
                children.add(answer)
                os.close(requests)
                os.close(results)
            else:
                children.remove(pid)
                answer = _end(pid, _REAP_S if command == REAP else 0.0)
            control.sendall(ANSWER.pack(answer))
    finally:
        for pid in children:
            _end(pid, 0.0)


def _end(pid: int, patience_s: float) -> int:
    """End a process and whatever it started; return its exit status, negative for a signal.

    Args:
        patience_s: time for one that is about to end to do so, with a status of its own.
    """
    deadline = time.monotonic() + patience_s
    while patience_s and time.monotonic() < deadline:
        # It stays to be waited for: only then is its number still its own.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(_POLL_S)
    # A process that nobody has waited for keeps its number: this cannot hit a stranger.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not have had the time to lead a group
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _try_sandbox(limits: ScoringLimits) -> str:
    """Return, as JSON, what restricts the processes forked here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, enter_worker(limits).to_json().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        report = file.read().decode()
    os.waitpid(pid, 0)
    return report


def _receive_frame(control: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(control.recv(LENGTH.size, socket.MSG_WAITALL))
    return control.recv(length, socket.MSG_WAITALL)


def _send_frame(control: socket.socket, fields: Mapping[str, Any]) -> None:
    data = json.dumps(fields).encode()
    control.sendall(LENGTH.pack(len(data)) + data)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
