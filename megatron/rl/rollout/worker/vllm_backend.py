# SPDX-License-Identifier: Apache-2.0
"""vLLM behind the few calls that the worker needs, answering with arrays. Worker process only."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint_index import read_checkpoint_index
from ..errors import EngineConfigError, EngineRequestError
from ..protocol import GenerationRequest, SamplingSettings
from ..rollouts import FinishedSequences
from ..transfer.nccl_library import engine_library_version
from .engine_weights import EngineWeights
from .fast_topk import install_fast_topk
from .logprob_rows import LogprobRows, install_logprob_rows
from .vllm_scores import score_tokens
from .vllm_sequences import EncodedSequence, encode_sequence, join_sequences

PROGRESS_INTERVAL_S = 0.5
# A part of an answer is sent when it is this large, and at least this often.
PART_BYTES = 4 << 20
PART_INTERVAL_S = 0.1

Progress = Callable[[Mapping[str, Any]], None]


class VLLMBackend:
    """One in-process `vllm.LLM`, its weights' version, and conversion to arrays."""

    def __init__(self, llm_arguments: Mapping[str, Any], device: str) -> None:
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu() != (device == "cpu"):
            raise EngineConfigError(
                f'device is "{device}", but the vLLM of this Python is built for '
                f"{current_platform.device_type}: change device, or set python to an "
                "interpreter with the other vLLM"
            )
        index = read_checkpoint_index(llm_arguments["model"])
        install_logprob_rows()
        if device == "cpu":
            install_fast_topk()
        self._llm = vllm.LLM(**llm_arguments)
        self.weights = EngineWeights(self._llm, index)
        self._batches = 0
        model = self._llm.model_config
        self.info: dict[str, Any] = {
            "vllm_version": vllm.__version__,
            "max_logprobs": model.max_logprobs,
            "vocab_size": model.get_vocab_size(),
            "max_model_len": model.max_model_len,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": current_platform.device_type,
            "nccl_version": engine_library_version(),
        }

    def generate(
        self,
        request: GenerationRequest,
        deliver: Callable[[FinishedSequences], None],
        progress: Progress,
        aborted: Callable[[], bool],
    ) -> float:
        """Sample all sequences and return the seconds that it took.

        Sequences that ended are delivered in parts while others run, progress is reported about
        twice a second; while either call waits, so does the engine. Once `aborted` says so, the
        rest is delivered as it is, and the engine is ready for the next request.

        The prefix cache is emptied first: what an earlier request left there changes rounding,
        and the same request would then not give the same numbers twice (nor after a restart).
        Prompts are still shared among the samples of one request.
        """
        self.weights.reset_prefix_cache()
        started = time.monotonic()
        order = self._submit(request)
        try:
            self._sample(request, order, deliver, progress, aborted)
        finally:  # also after an error: the next request finds an empty engine
            self._llm.llm_engine.abort_request(list(order))
        return time.monotonic() - started

    def _sample(
        self,
        request: GenerationRequest,
        order: Mapping[str, int],
        deliver: Callable[[FinishedSequences], None],
        progress: Progress,
        aborted: Callable[[], bool],
    ) -> None:
        engine = self._llm.llm_engine
        part = _Part(request, self.weights.version, deliver)
        started = last_report = time.monotonic()
        done, tokens_done, steps = 0, 0, 0
        while engine.has_unfinished_requests():
            if aborted():
                for sequence in self._unfinished(request, order):
                    part.add(sequence)
                break
            for output in engine.step():
                if output.finished:
                    index, completion = order[output.request_id], output.outputs[0]
                    sequence = self._encode(
                        request,
                        index,
                        completion.token_ids,
                        completion.logprobs,
                        completion.finish_reason,
                    )
                    part.add(sequence)
                    done, tokens_done = done + 1, tokens_done + len(sequence.tokens)
            steps += 1
            now = time.monotonic()
            if now - last_report >= PROGRESS_INTERVAL_S:
                last_report = now
                part.flush()
                progress(
                    {
                        "sequences_done": done,
                        "sequences": request.num_sequences,
                        "tokens_done": tokens_done,
                        "steps": steps,
                        "elapsed_s": now - started,
                    }
                )
        part.flush()

    def _unfinished(
        self, request: GenerationRequest, order: Mapping[str, int]
    ) -> Iterator[EncodedSequence]:
        """What there is of every sequence that the engine still works on.

        vLLM gives no output for an aborted request of this kind; its front end has the tokens and
        log-probs nevertheless.
        """
        for state in self._llm.llm_engine.output_processor.request_states.values():
            tokens = state.detokenizer.output_token_ids
            rows = state.logprobs_processor.logprobs
            yield self._encode(request, order[state.external_req_id], tokens, rows, None)

    def _encode(
        self,
        request: GenerationRequest,
        index: int,
        token_ids: Sequence[int],
        rows: LogprobRows,
        reason: str | None,
    ) -> EncodedSequence:
        return encode_sequence(
            index, token_ids, rows, reason, request.settings, self.info["vocab_size"]
        )

    def score(self, tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-probs of given tokens, see `score_tokens`."""
        self._batches += 1
        return score_tokens(self._llm, tokens, offsets, self._batches)

    def sleep(self) -> None:
        """Give up the GPU's memory: weights go to the host, the KV cache is dropped."""
        self._llm.sleep(level=1)

    def wake(self) -> None:
        """Take the memory back, with the weights from before."""
        if not self._llm.wake_up():
            raise RuntimeError("vLLM is not fully awake after wake_up")
        self.weights.reset_prefix_cache()

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _submit(self, request: GenerationRequest) -> dict[str, int]:
        """Add one engine request per sequence; returns the sequence index by request id."""
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input

        engine = self._llm.llm_engine
        seeds, max_tokens = request.seeds(), request.max_tokens()
        batch = self._batches
        self._batches += 1
        order: dict[str, int] = {}
        try:
            for prompt_index in range(request.num_prompts):
                prompt = request.prompt(prompt_index).tolist()
                for _ in range(request.samples_per_prompt):
                    index = len(order)
                    request_id = f"{batch}-{index}"
                    seed = None if seeds is None else int(seeds[index])
                    params = _sampling_params(request.settings, seed, int(max_tokens[index]))
                    engine.add_request(request_id, tokens_input(prompt), params)
                    order[request_id] = index
        except (ValueError, VLLMValidationError) as error:
            # vLLM's own validation: a refusal, which must not leave half a batch behind.
            engine.abort_request(list(order))
            raise EngineRequestError(f"vLLM refuses the request: {error}") from error
        return order


class _Part:
    """Sequences that wait to be delivered together."""

    def __init__(
        self,
        request: GenerationRequest,
        version: int,
        deliver: Callable[[FinishedSequences], None],
    ) -> None:
        self._request = request
        self._version = version
        self._deliver = deliver
        self._sequences: list[EncodedSequence] = []
        self._nbytes = 0
        self._last_flush = time.monotonic()

    def add(self, sequence: EncodedSequence) -> None:
        self._sequences.append(sequence)
        self._nbytes += sequence.nbytes
        now = time.monotonic()
        if self._nbytes >= PART_BYTES or now - self._last_flush >= PART_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        self._last_flush = time.monotonic()
        if self._sequences:
            self._deliver(join_sequences(self._request, self._sequences, self._version))
            self._sequences, self._nbytes = [], 0


def _sampling_params(settings: SamplingSettings, seed: int | None, max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=list(settings.stop_token_ids),
        ignore_eos=True,
        logprobs=settings.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
