# SPDX-License-Identifier: Apache-2.0
"""One engine process, seen from the trainer: start it, talk to it, notice its end, end it."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import (
    EngineConfigError,
    EngineDied,
    EngineError,
    EngineRequestError,
    EngineStartError,
    EngineTimeout,
    RolloutDataError,
    WeightNamesError,
)
from ..wire import Channel, Message, WireClosed, WireError, WireTimeout, WireTruncated

_POLL_S = 0.1
_POLITE_EXIT_S = 10.0
_TERMINATE_S = 3.0
_GROUP_END_S = 10.0
_LOG_TAIL_BYTES = 64 << 10
_LOG_LINE_CHARS = 300
_MAX_SOCKET_PATH = 100
_ERROR_LINE = re.compile(r"\b[A-Za-z_.]*(Error|Exception|Killed|Abort)\b")

_UCRED = struct.Struct("=3i")
# Refusals keep their type across the socket.
_REFUSALS: Mapping[str, type[EngineError]] = {
    error.__name__: error for error in (EngineRequestError, RolloutDataError, WeightNamesError)
}


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says about itself."""

    vllm_version: str
    max_logprobs: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    pid: int
    start_s: float
    nccl_version: int = 0


class WorkerHandle:
    """Owns one worker process from its start to its end; never restarts it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        worker_config: Mapping[str, Any],
        log_path: str,
    ) -> None:
        """Start the process and return at once; `wait_ready` takes its connection."""
        self._log_path = log_path
        self._log_start = os.path.getsize(log_path) if os.path.exists(log_path) else 0
        self._folder = _private_folder()
        self._channel: Channel | None = None
        self._ids = itertools.count(1)
        self._send_lock = threading.Lock()  # an abort may come from another thread
        self._exited = threading.Event()
        self._started_event = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._spawn_error: BaseException | None = None
        self.info: EngineInfo | None = None

        socket_path = str(self._folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path)
        self._listener.listen(1)
        config_path = self._folder / "config.json"
        config_path.write_text(json.dumps(worker_config))
        full = [*command, "--socket", socket_path, "--config-json", str(config_path)]
        full += ["--parent-pid", str(os.getpid())]
        # The kernel's "die with your parent" means the parent's *thread*. This one lives exactly
        # as long as the child, so that a caller's short-lived thread cannot take the engine along.
        threading.Thread(
            target=self._run_process, args=(full, dict(environment)), name="engine", daemon=True
        ).start()
        self._started_event.wait()
        if self._spawn_error is not None:
            self._release()
            raise EngineStartError(
                f"could not start the engine's Python {command[0]!r}: {self._spawn_error}. "
                "Set the engine's python to an interpreter with vLLM"
            ) from self._spawn_error

    def _run_process(self, command: list[str], environment: dict[str, str]) -> None:
        try:
            with open(self._log_path, "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the trainer, which then closes
                )
        except BaseException as error:
            self._spawn_error = error
            self._exited.set()
            return
        finally:
            self._started_event.set()
        self._process.wait()
        self._exited.set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, timeout_s: float, on_stage: Callable[[str], None]) -> EngineInfo:
        """Block until the engine has loaded its weights; raise EngineStartError if it does not."""
        if self.info is not None:
            return self.info
        deadline = time.monotonic() + timeout_s
        try:
            if self._channel is None:
                self._accept(deadline)
            while True:
                message = self._receive(max(_POLL_S, deadline - time.monotonic()))
                # The worker has read its configuration; a killed trainer leaves nothing behind.
                shutil.rmtree(self._folder, ignore_errors=True)
                if message.kind == "ready":
                    self.info = EngineInfo(**message.fields)
                    return self.info
                if message.kind == "error":
                    raise self._start_failure(message.fields)
                on_stage(str(message.fields.get("stage", message.kind)))
        except EngineTimeout:
            raise EngineStartError(
                f"the engine was not ready after {timeout_s:.0f} s: raise start_timeout_s if the "
                f"model is large or the disk slow. {self._log_hint()}"
            ) from None
        except EngineDied as error:
            raise EngineStartError(f"the engine did not start: {error}") from None

    def call(
        self,
        kind: str,
        fields: Mapping[str, Any],
        arrays: Mapping[str, Any],
        stall_timeout_s: float,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Message:
        """Send a command and return its answer; progress messages go to `on_progress`.

        Raises EngineRequestError for a refusal, EngineDied and EngineTimeout for the process.
        """
        request_id = self.post(kind, fields, arrays, stall_timeout_s)
        return self.answer(request_id, kind, stall_timeout_s, on_progress)

    def post(
        self,
        kind: str,
        fields: Mapping[str, Any],
        arrays: Mapping[str, Any],
        stall_timeout_s: float,
    ) -> int:
        """Send a command without waiting; `answer` takes the answers, in the order of posting."""
        assert self._channel is not None, "post() before wait_ready()"
        request_id = next(self._ids)
        message = Message(kind, {"id": request_id, **fields}, arrays)
        try:
            with self._send_lock:
                self._channel.send(message, stall_timeout_s)
        except WireTimeout:
            raise self._stalled(kind, stall_timeout_s) from None
        except WireClosed:
            raise self._died() from None
        return request_id

    def abort(self, request_id: int) -> None:
        """Ask for the answer to a posted command with what there is by now, from any thread."""
        channel = self._channel
        if channel is None:
            return
        with self._send_lock, contextlib.suppress(WireError):  # `answer` will notice
            channel.send(Message("abort", {"request": request_id}), _TERMINATE_S)

    def answer(
        self,
        request_id: int,
        kind: str,
        stall_timeout_s: float,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
        on_part: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Message:
        """Wait for the answer to a posted command; raises like `call`.

        Where it comes in parts, `on_part` gets the arrays of each.
        """
        while True:
            try:
                message = self._receive(stall_timeout_s)
            except EngineTimeout:
                raise self._stalled(kind, stall_timeout_s) from None
            if message.fields.get("id") != request_id:
                raise EngineDied(
                    f"the engine answered {message.kind!r} to another request: the stream is "
                    f"unusable. {self._log_hint()}"
                )
            if message.kind == "error":
                text = f"{message.fields['type']}: {message.fields['message']}"
                if message.fields["fatal"]:
                    raise EngineDied(f"the engine failed during {kind}: {text}. {self._log_hint()}")
                refusal = _REFUSALS.get(message.fields["type"], EngineRequestError)
                raise refusal(str(message.fields["message"]))
            if message.kind == "progress":
                if on_progress is not None:
                    on_progress(message.fields)
            elif message.kind == "sequences" and on_part is not None:
                on_part(message.arrays)
            else:
                return message

    def stop(self) -> None:
        """Ask the process to end, then insist. Afterwards nothing of it is left."""
        if self._channel is not None and self.info is not None and not self._exited.is_set():
            with contextlib.suppress(WireError), self._send_lock:
                self._channel.send(Message("shutdown", {"id": next(self._ids)}), _TERMINATE_S)
                self._exited.wait(_POLITE_EXIT_S)
        if not self._exited.is_set():
            self._signal_group(signal.SIGTERM)
            self._exited.wait(_TERMINATE_S)
        self.kill()

    def kill(self) -> None:
        """End the process and its helpers at once, and give back what belongs to it."""
        self._signal_group(signal.SIGKILL)
        self._exited.wait(_GROUP_END_S)  # a process that a driver holds may never end
        # The helpers of a tensor-parallel engine are not our children, so nobody tells us when
        # they are gone; a new engine started earlier would find their GPU memory still taken.
        deadline = time.monotonic() + _GROUP_END_S
        while self._process and _group_lives(self._process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        self._release()

    def _accept(self, deadline: float) -> None:
        self._listener.settimeout(_POLL_S)
        while True:
            try:
                connection, _ = self._listener.accept()
                if peer_user(connection) == os.getuid():
                    break
                connection.close()
            except TimeoutError:
                if self._exited.is_set():
                    raise self._died() from None
                if time.monotonic() > deadline:
                    raise EngineTimeout("the engine process did not connect") from None
        self._listener.close()
        self._channel = Channel(connection)

    def _receive(self, timeout_s: float) -> Message:
        assert self._channel is not None
        try:
            return self._channel.receive(timeout_s)
        except WireTimeout as error:
            raise EngineTimeout(str(error)) from None
        except (WireClosed, WireTruncated):
            raise self._died() from None
        except WireError as error:
            raise EngineDied(f"the engine sent garbage: {error}. {self._log_hint()}") from None

    def _died(self) -> EngineDied:
        # The socket closes a moment before the exit status is there.
        self._exited.wait(_TERMINATE_S)
        status = None if self._process is None else self._process.returncode
        if status is None:
            how = "closed its connection"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            if status == -signal.SIGKILL:
                how += " (out of memory?)"
        else:
            how = f"ended with status {status}"
        return EngineDied(f"the engine process {how}. {self._log_hint()}")

    def _stalled(self, kind: str, stall_timeout_s: float) -> EngineTimeout:
        return EngineTimeout(
            f"the engine reported nothing for {stall_timeout_s:.0f} s during {kind} and counts as "
            f"hung: raise stall_timeout_s if one step can take that long. {self._log_hint()}"
        )

    def _start_failure(self, fields: Mapping[str, Any]) -> EngineError:
        text = f"the engine did not start: {fields['type']}: {fields['message']}"
        if fields.get("configuration"):
            return EngineConfigError(text)
        return EngineStartError(f"{text}. {self._log_hint()}")

    def _log_hint(self) -> str:
        line = last_error_line(self._log_path, self._log_start)
        return f"Last error in its log: {line} (log: {self._log_path})"

    def _signal_group(self, number: int) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # the group's id is the leader's: a new session

    def _release(self) -> None:
        self._listener.close()
        if self._channel is not None:
            self._channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def last_error_line(log_path: str, start: int = 0) -> str:
    """The last line of a log that names an error, else its last line, shortened."""
    try:
        with open(log_path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return "none, there is no log"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    if not lines:
        return "none, it is empty"
    line = (errors or lines)[-1]
    return line if len(line) <= _LOG_LINE_CHARS else line[:_LOG_LINE_CHARS] + " ..."


def _group_lives(group: int) -> bool:
    """Whether a process of this group exists that is more than a zombie."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = Path(entry.path, "stat").read_text()
                # "pid (name) state parent group ...", and the name may contain anything
                state, _, its_group = text.rpartition(")")[2].split()[:3]
                if int(its_group) == group and state not in ("Z", "X"):
                    return True
    return False


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, as the kernel knows it."""
    # struct ucred: pid_t pid; uid_t uid; gid_t gid
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, user, _ = _UCRED.unpack(credentials)
    return int(user)


def _private_folder() -> Path:
    """A folder that only this user can enter, with a path short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="rollout-"))  # mkdtemp makes it 0700
    if len(str(folder / "socket")) > _MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="rollout-", dir="/tmp"))
    return folder
