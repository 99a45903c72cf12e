# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the process that loads a task and forks scoring processes."""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.rl.errors import UserError
from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.sandbox import SandboxReport
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_server import ANSWER, COMMAND, END, FORK, LENGTH, REAP
from megatron.rl.rewards.worker_link import ENDED, WorkerLink

_SERVER_MODULE = "megatron.rl.rewards.scoring_server"
_END_TIMEOUT_S = 5.0
_MAX_SHOWN_CHARS = 500
# Scorers use one core each, whatever their libraries think they have.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class ScoringServerLost(Exception):
    """The process that forks scoring processes is gone."""


class ScoringServer:
    """Owns that process from its start to its end.

    Attributes:
        task_name: as the task calls itself.
        sandbox: what restricts its scoring processes.
    """

    def __init__(self, spec: TaskSpec, limits: ScoringLimits) -> None:
        """Start it and wait until the task is loaded.

        Raises:
            UserError: the task cannot be made there.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # Libraries write here while they load; it is shown if that fails.
        with theirs, tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", _SERVER_MODULE]
                + [str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": _search_path()[0]},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
            theirs.close()
            try:
                ready = self._load(spec, limits)
            except (ConnectionError, ScoringServerLost):
                self.close()
                output.seek(0)
                last = output.read().decode("utf-8", "replace").strip()[-_MAX_SHOWN_CHARS:]
                raise UserError(
                    f"task.name: the process that scores {spec.name} ended while loading the "
                    f"task: {' '.join(last.split()) or 'it said nothing'}"
                ) from None
            except BaseException:
                self._process.kill()  # it may still be busy loading
                self.close()
                raise
        self.task_name = str(ready["name"])
        self.sandbox = SandboxReport.from_json(ready["sandbox"])

    def fork(self) -> WorkerLink:
        """Return a new scoring process.

        Raises:
            ScoringServerLost: the server is gone.
        """
        request_reader, request_writer = os.pipe()
        result_reader, result_writer = os.pipe()
        try:
            pid = self._command(FORK, 0, (request_reader, result_writer))
        except BaseException:
            os.close(request_writer)
            os.close(result_reader)
            raise
        finally:
            os.close(request_reader)
            os.close(result_writer)
        return WorkerLink(pid, request_writer, result_reader)

    def end(self, worker: WorkerLink) -> int:
        """End a scoring process; return its exit status, negative for a signal.

        Raises:
            ScoringServerLost: the server is gone, and all its processes with it.
        """
        worker.close()
        return self._command(REAP if worker.broken == ENDED else END, worker.pid)

    def close(self) -> None:
        """End the server and all its scoring processes."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _load(self, spec: TaskSpec, limits: ScoringLimits) -> Mapping[str, Any]:
        for part in (json.dumps(_search_path()).encode(), pickle.dumps((spec, limits))):
            self._control.sendall(LENGTH.pack(len(part)) + part)
        self._control.settimeout(limits.start_timeout_s)
        try:
            (length,) = LENGTH.unpack(self._receive(LENGTH.size))
            answer: Mapping[str, Any] = json.loads(self._receive(length))
        except TimeoutError:
            raise UserError(
                f"scoring.start_timeout_s: loading the task {spec.name} took more than "
                f"{limits.start_timeout_s:g} s; raise it if the task is large"
            ) from None
        self._control.settimeout(None)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer

    def _command(self, command: bytes, pid: int, descriptors: tuple[int, ...] = ()) -> int:
        message = COMMAND.pack(command, pid)
        try:
            socket.send_fds(self._control, [message], descriptors)
            (answer,) = ANSWER.unpack(self._receive(ANSWER.size))
        except OSError as error:
            raise ScoringServerLost(str(error)) from None
        return int(answer)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._control.recv(size - len(data))
            if not part:
                raise ScoringServerLost("the process that loads the task has ended")
            data += part
        return data


def _search_path() -> list[str]:
    """Where modules are found, for a process whose own rules may differ; this project first."""
    project = str(Path(__file__).resolve().parents[3])
    return list(dict.fromkeys([project, *(entry or os.getcwd() for entry in sys.path)]))
