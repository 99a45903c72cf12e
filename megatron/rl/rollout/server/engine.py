# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that runs already: an existing vLLM server, reached over HTTP.

Sampling is token-in/token-out, one request a sequence. Control goes through vLLM's development
routes, weights through a transport (`weights.py`). The server is never restarted from here.
"""

import itertools
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ..checkpoint_index import CheckpointIndex, read_checkpoint_index
from ..client.collector import SequenceCollector
from ..client.engine_config import EXTENSION_CLASS
from ..errors import EngineConfigError, EngineError, EngineRequestError, EngineTimeout
from ..protocol import GenerationRequest, OnFinished, WeightsReport
from ..request_checks import EngineLimits, check_request, check_scored, check_sleep_level
from ..rollouts import Rollouts
from ..transfer.weight_format import WeightFormat
from ..worker.vllm_sequences import EncodedSequence, join_sequences
from .client import ServerClient, ServerStatusError
from .info import VERSION, ServerInfo, serves_own_folder
from .response import (
    GENERATE_PATH,
    generate_body,
    read_generated,
    read_scores,
    score_body,
)
from .start import CONTROL_TIMEOUT_S, VLLMServerConfig, choose_transport, meet_server
from .url import parse_server_url, read_token
from .weights import CHECKPOINT_LABEL, ServerWeights, post_control, reset_prefix_cache

if TYPE_CHECKING:
    import torch

__all__ = ["VLLMServerConfig", "VLLMServerEngine"]

_POLL_S = 0.5
# The server is asked how many tokens it has sampled when no sequence has ended for so long.
_QUIET_S = 5.0
_ABORT_PATH = "/inference/v1/abort_requests"
# vLLM puts this before the request id that it is given.
_ID_PREFIX = "generate-tokens-"
_TOKEN_COUNTER = re.compile(rb"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


class VLLMServerEngine:
    """A `RolloutEngine` on somebody's vLLM server. Calls from several threads take turns.

    on_event(text)       what is found at the start; for the run's log
    on_progress(fields)  during generation: sequences_done, sequences, tokens_done, elapsed_s
    """

    def __init__(
        self,
        config: VLLMServerConfig,
        on_event: Callable[[str], None] | None = None,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Check address, token and model folder; nothing is sent yet.

        Raises EngineConfigError (a ValueError).
        """
        self._config = config
        self._address = parse_server_url(config.url, allow_remote=config.allow_remote)
        token = read_token(config.token_variable)
        self._client = ServerClient(self._address, token)
        self._index: CheckpointIndex = read_checkpoint_index(config.model_path)
        self._limits = EngineLimits(
            config.top_logprobs, config.max_model_len, self._index.vocab_size
        )
        self._on_event = on_event or (lambda text: None)
        self._on_progress = on_progress
        self._lock = threading.RLock()
        # Labels of weights and requests that no other run has.
        self._name = secrets.token_hex(4)
        self._label = CHECKPOINT_LABEL
        self._version = 0
        self._batches = itertools.count()
        self._running: tuple[str, ...] = ()
        self._abort_requested = threading.Event()
        self._weights: ServerWeights | None = None
        self._sleeping = False
        self._closed = False
        self.info: ServerInfo | None = None
        if token is not None and not self._address.loopback and self._address.scheme == "http":
            self._on_event("rollout server: the token crosses the network unencrypted (http://)")

    def start(self) -> None:
        """Nothing: the server runs already."""

    def wait_ready(self) -> ServerInfo:
        """Block until the server answers, and check that it fits; returns what it says.

        A server that holds other weights than its model folder's is given those of the run's.

        Raises EngineStartError when it does not answer, EngineConfigError when it does not fit.
        """
        with self._lock:
            if self.info is not None:
                return self.info
            info = meet_server(self._client, self._address, self._config, self._index)
            if self._weights is None:
                self._weights = self._make_weights(info)
            self._on_event(f"rollout server: vLLM {info.vllm_version} at {self._address}")
            if not info.vllm_version.startswith(VERSION + "."):
                self._on_event(f"rollout server: it is not vLLM {VERSION}, which this is made for")
            held = self._client.get("/weight_info", CONTROL_TIMEOUT_S)["weight_version"]
            if held != CHECKPOINT_LABEL or not serves_own_folder(info, self._config.model_path):
                self._on_event("rollout server: giving it the weights of the model folder")
                self._update(
                    _read_checkpoint(self._config.model_path, self._index),
                    0,
                    {name: tensor.shape for name, tensor in self._index.tensors.items()},
                )
            self.info = info
            return info

    def generate(
        self, request: GenerationRequest, on_finished: OnFinished | None = None
    ) -> Rollouts:
        """Sample responses with the last weights; see `RolloutEngine`.

        At most `max_num_seqs` requests are open at once. A request is made again only where its
        connection turned out to be closed before an answer began: with a seed the answer is the
        same. The prefix cache is emptied first, so that the same request gives the same numbers.
        """
        check_request(request, self._limits)
        with self._lock:
            self._require_ready()
            self._abort_requested.clear()
            started = time.monotonic()
            collector = SequenceCollector(request, self._index.vocab_size, on_finished)
            prefix = f"{self._name}-{next(self._batches)}-"
            # From here on an abort counts.
            self._running = tuple(f"{prefix}{i}" for i in range(request.num_sequences))
            try:
                reset_prefix_cache(self._client, self._config.stall_timeout_s)
                self._sample(request, collector, started)
            finally:
                self._running = ()
            return collector.rollouts(time.monotonic() - started)

    def abort(self) -> None:
        """Have a running `generate` return what there is; see `RolloutEngine`."""
        if self._running:
            self._abort_requested.set()
            self._abort_running()

    def _abort_running(self) -> None:
        ids = [_ID_PREFIX + request_id for request_id in self._running]
        self._client.post(_ABORT_PATH, {"request_ids": ids}, CONTROL_TIMEOUT_S)

    def update_weights(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> WeightsReport:
        """Replace all weights by (Hugging Face name, tensor) pairs; see `RolloutEngine`.

        Raises WeightNamesError before the server is touched. Where it fails later the server stays
        paused, and has to be restarted.
        """
        if version < 0:
            raise EngineRequestError(f"a policy version must be >= 0, got {version}")
        with self._lock:
            self._require_ready()
            return self._update(tensors, version, shapes)

    def _update(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
        shapes: Mapping[str, Sequence[int]] | None,
    ) -> WeightsReport:
        assert self._weights is not None
        label = f"{self._name}:{version}"
        report = self._weights.update(tensors, shapes, version, label)
        self._label, self._version = label, version
        return report

    def weight_slot(self, name: str, shape: Sequence[int]) -> "torch.Tensor | None":
        """Where a tensor may be assembled so that packing it costs nothing; None: anywhere."""
        return None if self._weights is None else self._weights.slot(name, shape)

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Log-probs at temperature 1 of given tokens: of each one but the first, per sequence."""
        check_scored(sequences, self._limits)
        with self._lock:
            self._require_ready()
            reset_prefix_cache(self._client, self._config.stall_timeout_s)
            return [
                read_scores(
                    self._client.post(
                        GENERATE_PATH, score_body(tokens), self._config.stall_timeout_s
                    ),
                    tokens,
                )
                for tokens in sequences
            ]

    def sleep(self, level: int = 1) -> None:
        """Free the server's GPU memory; what is in flight is aborted. Only level 1."""
        check_sleep_level(level)
        with self._lock:
            self._require_ready()
            assert self.info is not None
            if not self.info.sleep_mode:
                raise EngineConfigError(
                    "the server cannot sleep: start it with --enable-sleep-mode (CUDA only)"
                )
            post_control(self._client, "/sleep", {}, self._config.stall_timeout_s, level="1")
            self._sleeping = True

    def wake(self) -> None:
        """Take the memory back, with the weights from before; nothing when it is awake."""
        with self._lock:
            if not self._sleeping:
                return
            answer = post_control(self._client, "/wake_up", {}, self._config.stall_timeout_s)
            if answer["status"] != "awake":
                raise EngineError(f"the server is {answer['status']!r} after /wake_up")
            self._sleeping = False
            reset_prefix_cache(self._client, self._config.stall_timeout_s)

    def close(self) -> None:
        """Leave the server as it is, and give back what this run holds. Safe to call twice."""
        self._client.interrupt()
        with self._lock:
            self._closed = True
            if self._weights is not None:
                self._weights.close()

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

    def _sample(
        self, request: GenerationRequest, collector: SequenceCollector, started: float
    ) -> None:
        """Have threads fetch the sequences, and see to it that something moves."""
        workers = min(self._config.max_num_seqs, request.num_sequences)
        quiet_s = min(_QUIET_S, self._config.stall_timeout_s / 2)
        pool = ThreadPoolExecutor(workers, thread_name_prefix="rollout-server")
        try:
            waiting = {
                pool.submit(self._fetch, request, i): i for i in range(request.num_sequences)
            }
            last_move, tokens_done, counted = time.monotonic(), 0, -1.0
            while waiting:
                done, _ = wait(waiting, _POLL_S, FIRST_COMPLETED)
                for future in done:
                    del waiting[future]
                    if (sequence := future.result()) is not None:
                        tokens_done += len(sequence.tokens)
                        collector.add(join_sequences(request, [sequence], self._version))
                now = time.monotonic()
                if done:
                    last_move = now
                    continue
                self._report(request, len(waiting), tokens_done, now - started)
                if self._abort_requested.is_set():
                    self._abort_running()  # again: some were on their way to the server
                if now - last_move > quiet_s:
                    # No sequence has ended, but tokens may have been sampled.
                    before, counted = counted, self._tokens_sampled()
                    if counted != before:
                        last_move = now
                    elif now - last_move > self._config.stall_timeout_s:
                        raise self._stalled(len(waiting))
        except BaseException:
            # The server cancels what its client no longer waits for.
            self._client.interrupt()
            pool.shutdown(cancel_futures=True)
            if not self._closed:
                self._client.resume()
            raise
        finally:
            self._client.close_kept()
        pool.shutdown()
        self._report(request, 0, tokens_done, time.monotonic() - started)
        if self._abort_requested.is_set():
            collector.abort_missing()

    def _fetch(self, request: GenerationRequest, index: int) -> EncodedSequence | None:
        """One sequence; None where it was aborted before it was asked for. Runs in a thread."""
        if self._abort_requested.is_set():
            return None
        body = generate_body(request, index, self._running[index], self._index.vocab_size)
        answer = self._client.post_again(GENERATE_PATH, body, None)
        return read_generated(answer, index, request.settings, self._index.vocab_size, self._label)

    def _report(
        self, request: GenerationRequest, waiting: int, tokens_done: int, seconds: float
    ) -> None:
        if self._on_progress is not None:
            self._on_progress(
                {
                    "sequences_done": request.num_sequences - waiting,
                    "sequences": request.num_sequences,
                    "tokens_done": tokens_done,
                    "elapsed_s": seconds,
                }
            )

    def _stalled(self, waiting: int) -> EngineTimeout:
        return EngineTimeout(
            f"the server at {self._address} sampled nothing for "
            f"{self._config.stall_timeout_s:.0f} s, {waiting} sequences are open: look at its log, "
            "or raise rollout.stall_timeout_s"
        )

    def _tokens_sampled(self) -> float:
        """All tokens that the server has ever sampled; -1 where it keeps no statistics."""
        try:
            found = _TOKEN_COUNTER.findall(self._client.get_bytes("/metrics", CONTROL_TIMEOUT_S))
        except ServerStatusError:
            return -1.0
        return sum(map(float, found)) if found else -1.0

    def _require_ready(self) -> None:
        if self._closed:
            raise EngineError("this rollout engine was closed; make a new one")
        if self._running:  # other threads wait for the lock
            raise EngineError("called from a callback of generate, which still runs")
        if self.info is None:
            self.wait_ready()
        if self._sleeping:
            raise EngineRequestError("the server sleeps: wake() it first")
        assert self._weights is not None
        self._weights.require()

    def _make_weights(self, info: ServerInfo) -> ServerWeights:
        config = self._config
        transport = choose_transport(info, self._address, config, self._index)
        if config.digests and not info.has_extension:
            self._on_event(
                "rollout server: it was started without --worker-extension-cls "
                f"{EXTENSION_CLASS}, so digests are not compared after updates"
            )
        return ServerWeights(
            self._client,
            transport,
            self._index,
            WeightFormat(info.dtype, config.quantization, config.scales),
            bucket_bytes=config.bucket_mib << 20,
            with_digests=config.digests and info.has_extension,
            timeout_s=config.stall_timeout_s,
        )


def _read_checkpoint(folder: str, index: CheckpointIndex) -> "Iterator[tuple[str, torch.Tensor]]":
    from megatron.rl.weights.hf_files import HFTensors

    with HFTensors(folder) as files:
        for name in index.tensors:
            yield name, files.read(name)
