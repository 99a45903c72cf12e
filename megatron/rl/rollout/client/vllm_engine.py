# SPDX-License-Identifier: Apache-2.0
"""The rollout engine that the trainer holds: a vLLM process, kept alive.

It starts the process, checks requests before they travel, and answers with `Rollouts`. When the
process dies or hangs it is replaced, the last weights are sent again, and the request is run
again: with a seed, the answer is the same as if nothing had happened.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import (
    EngineConfigError,
    EngineDied,
    EngineError,
    EngineRequestError,
    EngineStartError,
    EngineTimeout,
    WeightsLost,
)
from ..messages import request_arrays, request_fields, sequences_from_arrays
from ..protocol import GenerationRequest, OnFinished, WeightsReport
from ..request_checks import EngineLimits, check_request, check_scored, check_sleep_level
from ..rollouts import Rollouts
from ..transfer.weight_packer import Bucket
from ..transfer.weight_update import WeightUpdates
from .collector import SequenceCollector
from .engine_config import (
    VLLMEngineConfig,
    check_model,
    worker_python,
)
from .engine_process import EngineProcess
from .worker_handle import EngineInfo, WorkerHandle

if TYPE_CHECKING:
    import torch

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
        self._limits = EngineLimits(
            config.top_logprobs, config.max_model_len, self._index.vocab_size
        )
        self._on_progress = on_progress
        self._lock = threading.RLock()
        self._weights = WeightUpdates(config, self._index)
        self._process = EngineProcess(
            config, self._weights, lambda: self._worker_command(), on_event or (lambda text: None)
        )
        self._abort_requested = threading.Event()
        self._generating = False
        self._running: int | None = None  # the number of the `generate` that the process works on
        self._asleep: WorkerHandle | None = None  # a process that replaced it is awake

    @property
    def log_path(self) -> str:
        """Where everything that the engine process prints goes."""
        return self._process.log_path

    @property
    def restarts(self) -> int:
        """How often the process was replaced in this run."""
        return self._process.restarts

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return None if self._process.handle is None else self._process.handle.pid

    def start(self) -> None:
        """Start the process and return at once, so that the trainer can build its model."""
        with self._lock:
            self._process.start()

    def wait_ready(self) -> EngineInfo:
        """Block until the engine can generate; returns its limits.

        Raises EngineStartError, or EngineConfigError for a setting that vLLM refuses.
        """
        with self._lock:
            return self._process.run("start", _info_of)

    def generate(
        self, request: GenerationRequest, on_finished: OnFinished | None = None
    ) -> Rollouts:
        """Sample responses with the last weights; see `RolloutEngine`.

        After a restart the request is repeated from its start, and `on_finished` gets only what
        it has not had. Without a seed the repetition is another sample.
        """
        check_request(request, self._limits)
        with self._lock:
            self._check_idle("generate")
            self._abort_requested.clear()
            self._generating = True
            try:
                return self._generate(request, on_finished)
            finally:
                self._generating = False

    def _generate(self, request: GenerationRequest, on_finished: OnFinished | None) -> Rollouts:
        collector = SequenceCollector(request, self._index.vocab_size, on_finished)
        problems: list[EngineError] = []

        def operation(handle: WorkerHandle) -> float:
            def take(arrays: Mapping[str, Any]) -> None:
                if problems:
                    return
                try:
                    part = sequences_from_arrays(arrays)
                    self._check_version(part.rollouts)
                    collector.add(part)
                except EngineError as error:
                    problems.append(error)  # raised when the process is done with the request
                    self._abort_running(handle)

            self._weights.require()
            if problems or self._abort_requested.is_set():
                return 0.0  # the process died meanwhile: there is nothing to repeat
            limit_s = self._config.stall_timeout_s
            fields, arrays = request_fields(request), request_arrays(request)
            self._running = running = handle.post("generate", fields, arrays, limit_s)
            try:
                if self._abort_requested.is_set():
                    handle.abort(running)
                answer = handle.answer(running, "generate", limit_s, self._on_progress, take)
            except BaseException:
                handle.abort(running)  # nobody takes the rest: the process can end at once
                raise
            finally:
                self._running = None
            return float(answer.fields["generation_s"])

        seconds = self._process.run("generate", operation)
        if problems:
            raise problems[0]
        if self._abort_requested.is_set():
            collector.abort_missing()
        if collector.missing():
            raise EngineError(
                f"the engine left out {collector.missing()} of {request.num_sequences} sequences; "
                f"see its log {self._process.log_path}"
            )
        return collector.rollouts(seconds)

    def abort(self) -> None:
        """Have a running `generate` return what there is; see `RolloutEngine`."""
        if self._generating:
            self._abort_requested.set()
            self._abort_running(self._process.handle)

    def _abort_running(self, handle: WorkerHandle | None) -> None:
        running = self._running
        if handle is not None and running is not None:
            handle.abort(running)

    def update_weights(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> WeightsReport:
        """Replace all weights by (Hugging Face name, tensor) pairs; see `RolloutEngine`.

        Raises WeightNamesError (a ValueError) before the engine is touched unless the names and
        shapes are exactly those of the checkpoint, and WeightsMismatch when the engine does not
        hold what was sent. The weights are kept for a restart until the next update.
        """
        if version < 0:
            raise EngineRequestError(f"a policy version must be >= 0, got {version}")
        with self._lock:
            self._process.check_usable()
            self._check_idle("update_weights")
            started = time.monotonic()
            buckets = self._weights.pack(tensors, shapes, self._dtype())
            if isinstance(tensors, Mapping) or shapes is not None:
                self._stream(buckets, version)
            self._weights.complete(version)
            self._process.run("update_weights", lambda handle: None)
            return self._weights.report(time.monotonic() - started)

    def weight_slot(self, name: str, shape: Sequence[int]) -> "torch.Tensor | None":
        """Where a tensor may be assembled, see `RolloutEngine`."""
        with self._lock:
            return self._weights.slot(name, shape, self._dtype())

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Log-probs at temperature 1 of given tokens: of each one but the first, per sequence."""
        offsets = check_scored(sequences, self._limits)
        arrays = {"tokens": np.concatenate(sequences).astype(np.int32), "offsets": offsets}

        def operation(handle: WorkerHandle) -> NDArray[np.float32]:
            self._weights.require()
            answer = handle.call("score", {}, arrays, self._config.stall_timeout_s)
            return answer.arrays["log_probs"]

        with self._lock:
            self._check_idle("score")
            log_probs = self._process.run("score", operation)
        ends = (offsets - np.arange(len(offsets)))[1:-1]  # one log-prob less than tokens, each
        return np.split(log_probs, ends)

    def sleep(self, level: int = 1) -> None:
        """Free the engine's GPU memory until `wake`: weights go to the host, the KV cache is lost.

        Raises EngineConfigError where the engine was not started for it, and EngineRequestError
        for another level than 1.
        """
        check_sleep_level(level)
        if not self._config.sleep:
            raise EngineConfigError(
                "the engine was not started with sleep mode: set rollout.sleep (CUDA only)"
            )

        def operation(handle: WorkerHandle) -> None:
            handle.call("sleep", {}, {}, self._config.stall_timeout_s)
            self._asleep = handle

        with self._lock:
            self._check_idle("sleep")
            if not self._sleeping:
                self._process.run("sleep", operation)

    def wake(self) -> None:
        """Take the memory back, with the weights from before and an empty cache."""

        def operation(handle: WorkerHandle) -> None:
            if self._asleep is handle:
                handle.call("wake", {}, {}, self._config.stall_timeout_s)
            self._asleep = None

        with self._lock:
            self._check_idle("wake")
            if self._sleeping:
                self._process.run("wake", operation)

    def close(self) -> None:
        """End the process and whatever it started. Safe to call twice, and after failures."""
        if self._process.is_inherited:
            return  # a forked child of the trainer must not end its parent's engine
        with self._lock:
            self._process.close()

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
        return [worker_python(self._config), "-P", "-m", "megatron.rl.rollout.worker.process"]

    def _stream(self, buckets: Iterator[Bucket], version: int) -> None:
        """Send each bucket as soon as it is packed.

        When the process dies the rest is packed all the same, for the process that replaces it.
        """
        try:
            self._weights.stream(self._process.started(), buckets, version)
        except (EngineDied, EngineTimeout, EngineStartError, EngineConfigError) as error:
            self._process.failed("update_weights", error)
            for _ in buckets:
                pass
            if not self._weights.keeps_weights:
                raise WeightsLost(
                    f"the engine was replaced during an update over {self._config.transport}, "
                    "which keeps no copy of the weights: update again"
                ) from error
        except BaseException:
            self._process.discard_mixture()
            raise

    def _dtype(self) -> str:
        """The engine's type, in torch's words."""
        return self.wait_ready().dtype if self._config.dtype == "auto" else self._config.dtype

    def _check_version(self, rollouts: Rollouts) -> None:
        wrong = rollouts.policy_versions[rollouts.policy_versions != self._weights.version]
        if len(wrong):
            raise EngineError(
                f"the engine answered with tokens of version {wrong[0]}, expected "
                f"{self._weights.version}; see its log {self._process.log_path}"
            )

    @property
    def _sleeping(self) -> bool:
        """A process that was replaced meanwhile is awake."""
        return self._asleep is not None and self._asleep is self._process.handle

    def _check_idle(self, what: str) -> None:
        """Calls from other threads take turns; one from a callback of `generate` cannot.

        An engine that sleeps has to be woken before anything else.
        """
        if self._sleeping and what not in ("sleep", "wake"):
            raise EngineRequestError(f"{what}: the engine sleeps, wake() it first")
        if self._generating:
            raise EngineError(f"{what} was called from a callback of generate, which still runs")


def _info_of(handle: WorkerHandle) -> EngineInfo:
    assert handle.info is not None
    return handle.info
