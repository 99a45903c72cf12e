# SPDX-License-Identifier: Apache-2.0
"""The rollout engine that the trainer holds: a vLLM process, kept alive.

It starts the process, checks requests before they travel, and answers with `Rollouts`. When the
process dies or hangs it is replaced, the last weights are sent again, and the request is run
again: with a seed, the answer is the same as if nothing had happened.
"""

import atexit
import contextlib
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from .engine_config import (
    VLLMEngineConfig,
    check_model,
    llm_arguments,
    worker_environment,
    worker_python,
)
from .errors import (
    EngineConfigError,
    EngineDied,
    EngineError,
    EngineRequestError,
    EngineStartError,
    EngineTimeout,
)
from .protocol import GenerationRequest, Rollouts
from .weights_file import WeightsFile, write_weights
from .worker_handle import EngineInfo, WorkerHandle

if TYPE_CHECKING:
    import torch

_Result = TypeVar("_Result")

__all__ = ["VLLMEngine", "VLLMEngineConfig"]


class VLLMEngine:
    """A `RolloutEngine` on vLLM in a process of its own. Close it, or use it in a `with`.

    on_event(text)       starts, restarts and their reasons; for the run's log
    on_progress(fields)  about twice a second during generation: sequences_done, sequences,
                         tokens_done, steps, elapsed_s
    Calls from several threads take turns.
    """

    def __init__(
        self,
        config: VLLMEngineConfig,
        on_event: Callable[[str], None] | None = None,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Check the configuration and the model folder; nothing is started yet.

        Raises EngineConfigError (a ValueError) when the engine could not run like this.
        """
        self._config = config
        self._index = check_model(config)
        self._on_event = on_event or (lambda text: None)
        self._on_progress = on_progress
        self._lock = threading.RLock()
        self._handle: WorkerHandle | None = None
        self._weights: WeightsFile | None = None
        self._version = 0
        self._loaded_version: int | None = None  # in the process; None: the checkpoint's weights
        self._restarts = 0
        self._was_ready = False
        self._given_up: EngineDied | None = None
        self._closed = False
        self._keep_log = False  # set once an error has named it
        self._owner_pid = os.getpid()
        self._log_path = config.log_path or _default_log_path()

    @property
    def log_path(self) -> str:
        """Where everything that the engine process prints goes."""
        return self._log_path

    @property
    def restarts(self) -> int:
        """How often the process was replaced in this run."""
        return self._restarts

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return None if self._handle is None else self._handle.pid

    def start(self) -> None:
        """Start the process and return at once, so that the trainer can build its model."""
        with self._lock:
            self._check_usable()
            if self._handle is None:
                self._launch()

    def wait_ready(self) -> EngineInfo:
        """Block until the engine can generate; returns its limits.

        Raises EngineStartError, or EngineConfigError for a setting that vLLM refuses.
        """
        return self._run("start", self._info_of)

    def generate(self, request: GenerationRequest) -> Rollouts:
        """Sample responses with the last weights; see `RolloutEngine`."""
        self._check_request(request)
        settings = asdict(request.settings)
        settings["stop_token_ids"] = list(request.settings.stop_token_ids)
        fields = {
            "settings": settings,
            "samples_per_prompt": request.samples_per_prompt,
            "first_sequence_index": request.first_sequence_index,
        }
        arrays = {"prompt_tokens": request.prompt_tokens, "prompt_offsets": request.prompt_offsets}

        def operation(handle: WorkerHandle) -> Rollouts:
            answer = handle.call(
                "generate", fields, arrays, self._config.stall_timeout_s, self._on_progress
            )
            return Rollouts(
                **answer.arrays,
                policy_version=answer.fields["policy_version"],
                generation_s=answer.fields["generation_s"],
            )

        rollouts = self._run("generate", operation)
        rollouts.validate(self._index.vocab_size)
        self._check_answer(request, rollouts)
        return rollouts

    def update_weights(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
    ) -> None:
        """Replace all weights by (Hugging Face name, tensor) pairs; see `RolloutEngine`.

        Raises WeightNamesError (a ValueError) before the engine is touched unless the names and
        shapes are exactly those of the checkpoint. The weights are kept for a restart until the
        next update.
        """
        if version < 0:
            raise EngineRequestError(f"a policy version must be >= 0, got {version}")
        with self._lock:
            self._check_usable()
            new = write_weights(tensors, self._index)
            old, self._weights = self._weights, new
            self._version, self._loaded_version = version, None
            if old is not None:
                old.close()
            self._run("update_weights", lambda handle: None)
            if self._restarts >= self._config.max_restarts:
                new.close()  # nobody will read it again

    def close(self) -> None:
        """End the process and whatever it started. Safe to call twice, and after failures."""
        if os.getpid() != self._owner_pid:
            return  # a forked child of the trainer must not end its parent's engine
        with self._lock:
            self._closed = True
            atexit.unregister(self.close)
            if self._handle is not None:
                self._handle.stop()
                self._handle = None
            if self._config.log_path is None and not self._keep_log:
                with contextlib.suppress(OSError):
                    os.remove(self._log_path)
            if self._weights is not None:
                self._weights.close()
                self._weights = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _worker_command(self) -> list[str]:
        # -P: a file in the current folder may not stand in for one of vLLM's modules.
        return [worker_python(self._config), "-P", "-m", "megatron.rl.rollout.worker"]

    def _launch(self) -> None:
        atexit.register(self.close)
        self._handle = WorkerHandle(
            self._worker_command(),
            worker_environment(self._config),
            {"llm_arguments": llm_arguments(self._config), "device": self._config.device},
            self._log_path,
        )
        self._loaded_version = None
        self._on_event(f"rollout engine: started process {self._handle.pid}")

    def _ready_handle(self) -> WorkerHandle:
        """The process, up, within its limits, and with the last weights loaded."""
        if self._handle is None:
            self._launch()
        handle = self._handle
        assert handle is not None
        first_time = handle.info is None
        info = handle.wait_ready(
            self._config.start_timeout_s, lambda stage: self._on_event(f"rollout engine: {stage}")
        )
        if first_time:
            self._check_limits(info)
            self._on_event(f"rollout engine: ready after {info.start_s:.1f} s")
        self._was_ready = True
        if self._weights is not None and self._loaded_version != self._version:
            handle.call(
                "update_weights",
                {"path": self._weights.path, "version": self._version},
                {},
                self._config.stall_timeout_s,
            )
            self._loaded_version = self._version
        return handle

    def _run(self, what: str, operation: Callable[[WorkerHandle], _Result]) -> _Result:
        """Run `operation` on a ready process; replace the process while restarts are left."""
        with self._lock:
            self._check_usable()
            while True:
                try:
                    return operation(self._ready_handle())
                except (EngineDied, EngineTimeout, EngineStartError, EngineConfigError) as error:
                    self._keep_log = True
                    self._discard()
                    at_start = isinstance(error, (EngineStartError, EngineConfigError))
                    if at_start and not self._was_ready:
                        raise  # a wrong setting or machine: starting again would fail again
                    self._count_restart(what, error)
                except EngineError:
                    raise  # a refusal: the process is as good as before
                except BaseException:
                    # Interrupted half-way: the answer would arrive in the middle of the next
                    # request. The next one starts a fresh process; this is no failure.
                    self._discard()
                    raise

    def _count_restart(self, what: str, error: EngineError) -> None:
        if self._restarts >= self._config.max_restarts:
            self._given_up = EngineDied(
                f"rollout engine given up during {what} after {self._restarts} restart(s) of "
                f"max_restarts={self._config.max_restarts}: {error}"
            )
            raise self._given_up from error
        self._restarts += 1
        self._on_event(
            f"rollout engine: restart {self._restarts} of {self._config.max_restarts} during "
            f"{what}: {error}"
        )

    def _discard(self) -> None:
        handle, self._handle = self._handle, None
        self._loaded_version = None
        if handle is not None:
            handle.kill()

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError("this rollout engine was closed; make a new one")
        if self._given_up is not None:
            raise EngineDied(str(self._given_up))

    def _info_of(self, handle: WorkerHandle) -> EngineInfo:
        assert handle.info is not None
        return handle.info

    def _check_limits(self, info: EngineInfo) -> None:
        wanted = self._config.top_logprobs
        # vLLM writes "no limit" as -1; K beyond the vocabulary would fail at the first token.
        limit = info.vocab_size if info.max_logprobs < 0 else info.max_logprobs
        limit = min(limit, info.vocab_size)
        if wanted > limit:
            raise EngineConfigError(
                f"top_logprobs={wanted} is above this engine's limit of {limit}: lower top_logprobs"
            )

    def _check_request(self, request: GenerationRequest) -> None:
        settings, vocab_size = request.settings, self._index.vocab_size
        if settings.top_logprobs > self._config.top_logprobs:
            raise EngineRequestError(
                f"the request asks for top_logprobs={settings.top_logprobs}, the engine was "
                f"started for {self._config.top_logprobs}: raise the engine's top_logprobs"
            )
        longest = int(np.diff(request.prompt_offsets).max())
        if longest + settings.max_tokens > self._config.max_model_len:
            raise EngineRequestError(
                f"a prompt of {longest} tokens with max_tokens={settings.max_tokens} exceeds "
                f"max_model_len={self._config.max_model_len}: raise max_model_len, or shorten "
                "prompts or responses (the engine would cut them without a word)"
            )
        stops = np.asarray(settings.stop_token_ids, dtype=np.int64)
        for name, ids in (("prompt token", request.prompt_tokens), ("stop token", stops)):
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if len(wrong):
                raise EngineRequestError(
                    f"{name} {wrong[0]} is outside the vocabulary (0 ... {vocab_size - 1}): is the "
                    "tokenizer the model's own?"
                )

    def _check_answer(self, request: GenerationRequest, rollouts: Rollouts) -> None:
        """What `Rollouts.validate` cannot know: that this is the answer to this request."""
        expected = (request.num_sequences, request.settings.top_logprobs, self._version)
        got = (rollouts.num_sequences, rollouts.topk_ids.shape[1], rollouts.policy_version)
        if expected != got:
            raise EngineError(
                f"the engine answered with (sequences, K, version) {got}, expected {expected}; "
                f"see its log {self._log_path}"
            )


def _default_log_path() -> str:
    return os.path.join(tempfile.gettempdir(), f"rollout-engine-{secrets.token_hex(8)}.log")
