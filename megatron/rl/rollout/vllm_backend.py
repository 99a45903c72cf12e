# SPDX-License-Identifier: Apache-2.0
"""vLLM behind the few calls that the worker needs, answering with arrays. Worker process only."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint_index import check_update_names, read_checkpoint_index, read_safetensors_header
from .errors import EngineConfigError, EngineRequestError, RolloutDataError
from .protocol import (
    ABSENT_TOKEN_ID,
    MISSING_LOG_PROB_SENTINEL,
    GenerationRequest,
    Rollouts,
    SamplingSettings,
)

PROGRESS_INTERVAL_S = 0.5

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
        self._index = read_checkpoint_index(llm_arguments["model"])
        self._llm = vllm.LLM(**llm_arguments)
        self._version = 0
        self._batches = 0
        model = self._llm.model_config
        self.info: dict[str, Any] = {
            "vllm_version": vllm.__version__,
            "max_logprobs": model.max_logprobs,
            "vocab_size": model.get_vocab_size(),
            "max_model_len": model.max_model_len,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": current_platform.device_type,
        }

    def generate(self, request: GenerationRequest, progress: Progress) -> Rollouts:
        """Sample all sequences, reporting progress about twice a second.

        The prefix cache is emptied first: what an earlier request left there changes rounding,
        and the same request would then not give the same numbers twice (nor after a restart).
        Prompts are still shared among the samples of one request.
        """
        self._reset_prefix_cache()
        started = time.monotonic()
        order = self._submit(request)
        pieces: dict[int, _Sequence] = {}
        problem: RolloutDataError | None = None
        tokens_done, steps, last_report = 0, 0, started
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and problem is None:
                    index = order[output.request_id]
                    try:
                        piece = _convert(output.outputs[0], request.settings.top_logprobs)
                    except RolloutDataError as error:
                        problem = error  # raised once the engine has nothing left to do
                        continue
                    pieces[index] = piece
                    tokens_done += len(piece.tokens)
            steps += 1
            now = time.monotonic()
            if now - last_report >= PROGRESS_INTERVAL_S:
                last_report = now
                progress(
                    {
                        "sequences_done": len(pieces),
                        "sequences": request.num_sequences,
                        "tokens_done": tokens_done,
                        "steps": steps,
                        "elapsed_s": now - started,
                    }
                )
        if problem is not None:
            raise problem
        return self._assemble(request, pieces, time.monotonic() - started)

    def update_weights(self, path: str, version: int) -> int:
        """Load a weights file into every vLLM worker; returns the number of tensors.

        The names are checked against the checkpoint before any byte is loaded. The prefix cache
        holds keys and values of the old weights, so it goes before anything can be generated.
        """
        check_update_names(read_safetensors_header(path), self._index)
        counts = self._llm.collective_rpc("rollout_load_weights", args=(path,))
        self._reset_prefix_cache()
        self._version = version
        return int(counts[0])

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache (requests still hold blocks); generating now "
                "would mix keys and values of old weights into new responses"
            )

    def _submit(self, request: GenerationRequest) -> dict[str, int]:
        """Add one engine request per sequence; returns the sequence index by request id."""
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input

        engine = self._llm.llm_engine
        seeds = request.seeds()
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
                    params = _sampling_params(request.settings, seed)
                    engine.add_request(request_id, tokens_input(prompt), params)
                    order[request_id] = index
        except (ValueError, VLLMValidationError) as error:
            # vLLM's own validation: a refusal, which must not leave half a batch behind.
            engine.abort_request(list(order))
            raise EngineRequestError(f"vLLM refuses the request: {error}") from error
        return order

    def _assemble(
        self, request: GenerationRequest, pieces: "dict[int, _Sequence]", seconds: float
    ) -> Rollouts:
        count = request.num_sequences
        if len(pieces) != count:
            raise RuntimeError(f"vLLM finished {len(pieces)} of {count} sequences and stopped")
        ordered = [pieces[index] for index in range(count)]
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum([len(piece.tokens) for piece in ordered], out=offsets[1:])
        prompts = np.arange(request.num_prompts, dtype=np.int32)
        return Rollouts(
            prompt_index=np.repeat(prompts, request.samples_per_prompt),
            response_tokens=np.concatenate([piece.tokens for piece in ordered]),
            response_offsets=offsets,
            log_probs=np.concatenate([piece.columns.log_probs for piece in ordered]),
            topk_ids=np.concatenate([piece.columns.topk_ids for piece in ordered]),
            topk_log_probs=np.concatenate([piece.columns.topk_log_probs for piece in ordered]),
            finished=np.array([piece.finished for piece in ordered], dtype=np.bool_),
            policy_version=self._version,
            generation_s=seconds,
        )


@dataclass(frozen=True, slots=True)
class SplitColumns:
    """vLLM's K + 1 columns per token, split: log_probs[T], topk_ids[T, K], topk_log_probs[T, K]."""

    log_probs: NDArray[np.float32]
    topk_ids: NDArray[np.int32]
    topk_log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One response as arrays, while the others are still being generated."""

    tokens: NDArray[np.int32]
    columns: SplitColumns
    finished: bool


def _sampling_params(settings: SamplingSettings, seed: int | None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=seed,
        max_tokens=settings.max_tokens,
        stop_token_ids=list(settings.stop_token_ids),
        ignore_eos=True,
        logprobs=settings.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _convert(completion: Any, top_logprobs: int) -> _Sequence:
    reason = completion.finish_reason
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a sequence with {reason!r}, expected 'stop' or 'length'")
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    flat = completion.logprobs
    columns = split_columns(
        tokens,
        np.asarray(flat.token_ids, dtype=np.int32),
        np.asarray(flat.logprobs, dtype=np.float32),
        top_logprobs,
    )
    return _Sequence(tokens, columns, reason == "stop")


def split_columns(
    tokens: NDArray[np.int32],
    flat_ids: NDArray[np.int32],
    flat_log_probs: NDArray[np.float32],
    top_logprobs: int,
) -> SplitColumns:
    """Split T x (K + 1) flat entries into the sampled token's log-prob and exactly K top entries.

    vLLM gives the sampled token first and then the K largest, so that the sampled one is there
    twice when it is among them. That order is checked here, by id and by value, and anything else
    is refused: a log-prob read from the wrong column looks plausible and ruins the training.
    """
    count, width = len(tokens), top_logprobs + 1
    if flat_ids.shape != (count * width,) or flat_log_probs.shape != flat_ids.shape:
        raise RolloutDataError(
            f"vLLM returned {len(flat_ids)} log-prob entries for {count} tokens, expected "
            f"{width} per token (K={top_logprobs} and the sampled one)"
        )
    ids = flat_ids.reshape(count, width)
    values = flat_log_probs.reshape(count, width)
    sampled, topk_ids, topk = values[:, 0], ids[:, 1:].copy(), values[:, 1:].copy()
    if (ids[:, 0] != tokens).any():
        raise RolloutDataError("vLLM's first log-prob entry of a token is not the sampled token")
    if np.isnan(values).any():
        raise RolloutDataError(
            "vLLM returned NaN log-probs: its logits are garbage. Look at the weights that it "
            "last received"
        )
    if (topk[:, 1:] > topk[:, :-1]).any():
        raise RolloutDataError("vLLM's top-K log-probs are not sorted from the largest down")
    matches = topk_ids == tokens[:, None]
    if (matches.sum(axis=1) > 1).any() or (matches & (topk != sampled[:, None])).any():
        raise RolloutDataError("vLLM's two entries for a sampled token disagree")
    if top_logprobs and (~matches.any(axis=1) & (sampled > topk[:, -1])).any():
        raise RolloutDataError("a sampled token outside the top K is above the K-th log-prob")
    # top-k, top-p or min-p (evaluation only) leave fewer than K tokens: their places are empty.
    absent = (topk == -np.inf) | (topk == MISSING_LOG_PROB_SENTINEL)
    topk_ids[absent] = ABSENT_TOKEN_ID
    topk[absent] = -np.inf
    return SplitColumns(sampled.copy(), topk_ids, topk)


def request_from_wire(
    fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> GenerationRequest:
    """The request that the client put into a `generate` message."""
    settings = dict(fields["settings"])
    settings["stop_token_ids"] = tuple(settings["stop_token_ids"])
    return GenerationRequest(
        arrays["prompt_tokens"],
        arrays["prompt_offsets"],
        fields["samples_per_prompt"],
        SamplingSettings(**settings),
        fields["first_sequence_index"],
    )
