# SPDX-License-Identifier: Apache-2.0
"""The process of an engine over its restarts: started, given its weights, replaced when it dies."""

import atexit
import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from typing import TypeVar

from ..errors import EngineConfigError, EngineDied, EngineError, EngineStartError, EngineTimeout
from ..transfer.weight_update import WeightUpdates
from .engine_config import VLLMEngineConfig, llm_arguments, worker_environment
from .worker_handle import EngineInfo, WorkerHandle

_Result = TypeVar("_Result")


class EngineProcess:
    """Keeps one worker process available.

    handle    the present one, None between two
    restarts  how often it was replaced after a failure
    log_path  where everything that it prints goes

    It takes no lock: calls take turns, but for `close`, which may come at any time (the interpreter
    ends while a thread still waits for an answer). After that nothing is started any more.
    """

    def __init__(
        self,
        config: VLLMEngineConfig,
        weights: WeightUpdates,
        command: Callable[[], list[str]],
        on_event: Callable[[str], None],
    ) -> None:
        """Nothing is started yet; `command` is how to."""
        self._config = config
        self._weights = weights
        self._command = command
        self._on_event = on_event
        self.restarts = 0
        self._was_ready = False
        self._given_up: EngineDied | None = None
        self._closed = False
        self._keep_log = False  # set once an error has named it
        self._owner_pid = os.getpid()
        self.log_path = config.log_path or _default_log_path()
        self.handle: WorkerHandle | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the process that it belongs to."""
        return os.getpid() != self._owner_pid

    def check_usable(self) -> None:
        """Raise once it was closed or given up."""
        if self._closed:
            raise EngineError("this rollout engine was closed; make a new one")
        if self._given_up is not None:
            raise EngineDied(str(self._given_up))

    def start(self) -> WorkerHandle:
        """Start the process, unless there is one, and return at once."""
        self.check_usable()
        if self.handle is None:
            atexit.register(self.close)
            self.handle = WorkerHandle(
                self._command(),
                worker_environment(self._config) | self._weights.engine_environment(),
                {
                    "llm_arguments": llm_arguments(self._config) | self._weights.engine_arguments(),
                    "device": self._config.device,
                },
                self.log_path,
            )
            self._weights.process_started()
            self._on_event(f"rollout engine: started process {self.handle.pid}")
        return self.handle

    def started(self) -> WorkerHandle:
        """The process, up and within its limits."""
        handle = self.start()
        first_time = handle.info is None
        info = handle.wait_ready(
            self._config.start_timeout_s, lambda stage: self._on_event(f"rollout engine: {stage}")
        )
        if first_time:
            self._check_limits(info)
            self._weights.check_engine(info)
            self._on_event(f"rollout engine: ready after {info.start_s:.1f} s")
        self._was_ready = True
        return handle

    def run(self, what: str, operation: Callable[[WorkerHandle], _Result]) -> _Result:
        """Run `operation` on a process with the last weights; replace it while that is allowed."""
        while True:
            self.check_usable()
            try:
                handle = self.started()
                self._weights.give(handle)
                return operation(handle)
            except (EngineDied, EngineTimeout, EngineStartError, EngineConfigError) as error:
                self.failed(what, error)
            except EngineError:
                self.discard_mixture()
                raise  # a refusal: the process is as good as before
            except BaseException:
                # Interrupted half-way: the answer would arrive in the middle of the next
                # request. The next one starts a fresh process; this is no failure.
                self._discard()
                raise

    def failed(self, what: str, error: EngineError) -> None:
        """Discard the process and count its replacement; raise when there is to be none."""
        self._keep_log = True
        self._discard()
        self.check_usable()  # closed meanwhile, and ended for that
        at_start = isinstance(error, (EngineStartError, EngineConfigError))
        if at_start and not self._was_ready:
            raise error  # a wrong setting or machine: starting again would fail again
        limit = self._config.max_restarts
        if self.restarts >= limit:
            self._given_up = EngineDied(
                f"rollout engine given up during {what} after {self.restarts} restart(s) of "
                f"max_restarts={limit}: {error}"
            )
            raise self._given_up from error
        self.restarts += 1
        self._on_event(f"rollout engine: restart {self.restarts} of {limit} during {what}: {error}")

    def discard_mixture(self) -> None:
        """End a process that stopped between old and new weights."""
        if self._weights.mixed:
            self._discard()

    def close(self) -> None:
        """End the process and whatever it started, and free the weights. Not in a forked child."""
        if self.is_inherited:
            return
        self._closed = True
        atexit.unregister(self.close)
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.stop()
        if self._config.log_path is None and not self._keep_log:
            with contextlib.suppress(OSError):
                os.remove(self.log_path)
        self._weights.close()

    def _discard(self) -> None:
        handle, self.handle = self.handle, None
        self._weights.process_started()
        if handle is not None:
            handle.kill()

    def _check_limits(self, info: EngineInfo) -> None:
        wanted = self._config.top_logprobs
        # vLLM writes "no limit" as -1; K beyond the vocabulary would fail at the first token.
        limit = info.vocab_size if info.max_logprobs < 0 else info.max_logprobs
        limit = min(limit, info.vocab_size)
        if wanted > limit:
            raise EngineConfigError(
                f"top_logprobs={wanted} is above this engine's limit of {limit}: lower top_logprobs"
            )


def _default_log_path() -> str:
    return os.path.join(tempfile.gettempdir(), f"rollout-engine-{secrets.token_hex(8)}.log")
