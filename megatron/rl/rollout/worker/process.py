# SPDX-License-Identifier: Apache-2.0
"""The engine process: embeds vLLM, obeys one client over a Unix socket, dies with it.

    python -m megatron.rl.rollout.worker.process --socket PATH --config-json PATH [--parent-pid PID]

Started by `VLLMEngine`, possibly under another Python than the trainer's. It imports neither
megatron.core nor, before it has reported that it lives, vLLM. Its standard output and error are
its log; nothing of it reaches a terminal.

Messages (each answer repeats the request's `id`):
    -> starting {stage}                  while it comes up
    -> ready {limits of the engine}
    <- generate        -> progress and sequences ..., generated | error
    <- abort {request} (of a generate that runs; it has no answer of its own)
    <- score           -> scores | error
    <- sleep, wake     -> done | error
    <- init_transfer, start_update, update_bucket, finish_update (engine_weights.py) -> done | error
    <- shutdown        -> bye
An `error` with `fatal: false` is a refusal that changed nothing; after a fatal one the process
ends, since the state of the engine is not known any more.
"""

import argparse
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import EngineRequestError, RolloutDataError
from ..messages import request_from_message, sequences_message
from ..rollouts import FinishedSequences
from ..wire import Channel, Message, WireError
from .worker_link import WorkerLink

if TYPE_CHECKING:
    from .vllm_backend import VLLMBackend

_PR_SET_PDEATHSIG = 1
SEND_TIMEOUT_S = 600.0
MAX_MESSAGE_CHARS = 600


def main(arguments: Sequence[str] | None = None) -> None:
    """Connect, start the engine, serve until told to stop or until the client is gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--socket", required=True, help="Unix socket that the client listens on")
    parser.add_argument("--config-json", required=True, help="file with llm_arguments and device")
    parser.add_argument("--parent-pid", type=int, help="end when this is not the parent any more")
    options = parser.parse_args(arguments)

    _die_with_parent(options.parent_pid)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(options.socket)
    channel = Channel(sock)
    _die_with_connection(sock)
    try:
        config = json.loads(Path(options.config_json).read_text())
        link = WorkerLink(channel, SEND_TIMEOUT_S)
        backend = _start(link, config)
        _serve(link, backend)
    except WireError as error:
        print(f"worker: the connection to the client failed: {error}", file=sys.stderr)
        _leave(1)


def _start(link: WorkerLink, config: Mapping[str, Any]) -> "VLLMBackend":
    """Bring vLLM up and report its limits, or report why not and end."""
    started = time.monotonic()
    try:
        link.send(Message("starting", {"stage": "importing vLLM"}))
        import vllm  # noqa: F401 - the slow part, told apart from loading the model

        from .vllm_backend import VLLMBackend

        link.send(Message("starting", {"stage": "loading the model"}))
        backend = VLLMBackend(config["llm_arguments"], config["device"])
    except WireError:
        raise
    except BaseException as error:
        _report_fatal(link, None, error)
    ready = {**backend.info, "pid": os.getpid(), "start_s": time.monotonic() - started}
    link.send(Message("ready", ready))
    return backend


def _serve(link: WorkerLink, backend: "VLLMBackend") -> None:
    while True:
        message = link.receive()
        request_id = message.fields.get("id")
        if message.kind == "shutdown":
            link.send(Message("bye", {"id": request_id}))
            link.flush()
            _shut_down(backend)
        try:
            answer = _answer(link, backend, message)
        except WireError:
            raise
        except (EngineRequestError, RolloutDataError) as error:
            answer = _error_message(request_id, error, fatal=False)
        except Exception as error:
            _report_fatal(link, request_id, error)
        link.send(answer)


def _answer(link: WorkerLink, backend: "VLLMBackend", message: Message) -> Message:
    request_id = message.fields.get("id")
    if message.kind == "generate":

        def progress(fields: Mapping[str, Any]) -> None:
            link.send(Message("progress", {"id": request_id, **fields}))

        def deliver(sequences: FinishedSequences) -> None:
            link.send(sequences_message(request_id, sequences))

        seconds = backend.generate(
            request_from_message(message), deliver, progress, lambda: link.aborted(request_id)
        )
        return Message("generated", {"id": request_id, "generation_s": seconds})
    if message.kind == "score":
        log_probs = backend.score(message.arrays["tokens"], message.arrays["offsets"])
        return Message("scores", {"id": request_id}, {"log_probs": log_probs})
    if message.kind == "sleep":
        backend.sleep()
        return Message("done", {"id": request_id})
    if message.kind == "wake":
        backend.wake()
        return Message("done", {"id": request_id})
    if backend.weights.knows(message.kind):
        answer = backend.weights.answer(message)
        return Message(answer.kind, {"id": request_id, **answer.fields}, answer.arrays)
    raise EngineRequestError(f"the worker knows no command {message.kind!r}")


def _error_message(request_id: Any, error: BaseException, *, fatal: bool) -> Message:
    # The client cannot unpickle an exception, and need not: a name and a text are enough.
    return Message(
        "error",
        {
            "id": request_id,
            "type": type(error).__name__,
            "message": _one_line(str(error)),
            "fatal": fatal,
            # What vLLM finds wrong with its arguments it says with these two.
            "configuration": isinstance(error, (ValueError, TypeError)),
        },
    )


def _one_line(text: str) -> str:
    """Messages of several lines (pydantic's) become one, which fits an error or a log line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + " ..."


def _report_fatal(link: WorkerLink, request_id: Any, error: BaseException) -> NoReturn:
    traceback.print_exception(error)
    link.send(_error_message(request_id, error, fatal=True))
    link.flush()
    _leave(1)


def _shut_down(backend: "VLLMBackend") -> NoReturn:
    try:
        backend.shutdown()
    except Exception:
        traceback.print_exc()
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End at once: the interpreter's own farewell takes seconds with vLLM loaded, and can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with_parent(parent_pid: int | None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    It is the second line of defence, for a process that is stuck in native code; normally the
    closed connection is noticed first.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        # It ended before the line above took effect, or started this through a wrapper.
        print(f"worker: the parent is {os.getppid()}, expected {parent_pid}", file=sys.stderr)
        _leave(1)


def _die_with_connection(sock: socket.socket) -> None:
    """Watch for the client's end in a thread: the main thread may be deep in a generation."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poll.poll()
        print("worker: the client is gone, ending", file=sys.stderr, flush=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with the helpers that vLLM started
        os._exit(1)

    threading.Thread(target=watch, name="watch-client", daemon=True).start()


if __name__ == "__main__":
    main()
