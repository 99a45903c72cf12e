# SPDX-License-Identifier: Apache-2.0
"""What a trainer does without this project's transport: vLLM's dicts, pickled, then converted.

Plain vLLM in a process of its own, none of our replacements installed; one `Logprob` object for
each of the K + 1 entries of every token.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np

from megatron.rl.rollout.client.engine_config import (
    VLLMEngineConfig,
    llm_arguments,
    worker_environment,
)
from megatron.rl.rollout.protocol import GenerationRequest


@dataclass(frozen=True)
class NaiveRollouts:
    """response_tokens [N], log_probs [N], topk_ids [N, K], topk_log_probs [N, K], all sequences."""

    response_tokens: np.ndarray
    log_probs: np.ndarray
    topk_ids: np.ndarray
    topk_log_probs: np.ndarray


class NaiveEngine:
    """`vllm.LLM.generate` behind a pipe."""

    def __init__(self, config: VLLMEngineConfig) -> None:
        self._config = config

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, llm_arguments(self._config)), daemon=True
        )
        inherited = dict(os.environ)
        os.environ.clear()
        os.environ.update(worker_environment(self._config, inherited))
        os.environ.update(VLLM_LOGGING_LEVEL="ERROR", TQDM_DISABLE="1", PYTHONWARNINGS="ignore")
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(inherited)
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.send(None)
        self._process.join(20)
        self._process.kill()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def wait_ready(self) -> None:
        self._connection.recv()

    def generate(self, request: GenerationRequest) -> NaiveRollouts:
        self._connection.send(request)
        return _to_arrays(self._connection.recv(), request.settings.top_logprobs)


def _serve(connection: Connection, arguments: dict[str, Any]) -> None:
    # What vLLM and torch warn about while they load is not for the reader of a benchmark.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch
    import vllm

    torch.set_num_threads(1)
    llm = vllm.LLM(**arguments)
    connection.send("ready")
    while (request := connection.recv()) is not None:
        llm.reset_prefix_cache()
        outputs = llm.generate(*_prompts_and_params(request), use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        connection.send([(answer.token_ids, answer.logprobs) for answer in answers])


def _prompts_and_params(request: GenerationRequest) -> tuple[list[Any], list[Any]]:
    from vllm import SamplingParams

    seeds = request.seeds()
    assert seeds is not None
    prompts, params = [], []
    for index in range(request.num_sequences):
        prompt = request.prompt(index // request.samples_per_prompt)
        prompts.append({"prompt_token_ids": prompt.tolist()})
        params.append(
            SamplingParams(
                temperature=request.settings.temperature,
                seed=int(seeds[index]),
                max_tokens=request.settings.max_tokens,
                ignore_eos=True,
                logprobs=request.settings.top_logprobs,
                detokenize=False,
            )
        )
    return prompts, params


def _to_arrays(answers: list[Any], k: int) -> NaiveRollouts:
    tokens, log_probs, topk_ids, topk_log_probs = [], [], [], []
    for token_ids, positions in answers:
        for token, entries in zip(token_ids, positions, strict=True):
            tokens.append(token)
            log_probs.append(entries[token].logprob)
            # The sampled token comes first, and again by its rank where it is among the K.
            ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)[:k]
            topk_ids.append([token_id for token_id, _ in ranked])
            topk_log_probs.append([entry.logprob for _, entry in ranked])
    return NaiveRollouts(
        np.array(tokens, dtype=np.int32),
        np.array(log_probs, dtype=np.float32),
        np.array(topk_ids, dtype=np.int32),
        np.array(topk_log_probs, dtype=np.float32),
    )
