# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens from vLLM: each sequence is a prompt, of which nothing is continued."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineRequestError, RolloutDataError


def score_tokens(
    llm: Any, tokens: NDArray[np.int32], offsets: NDArray[np.int64], batch: int
) -> NDArray[np.float32]:
    """Log-probs at temperature 1 [N - B] of N tokens in B sequences: of each but the first.

    vLLM computes prompt log-probs only for positions that it runs through the model, so it does
    not read its prefix cache for such requests. It insists on sampling one token.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
    )
    order: dict[str, int] = {}
    scores: dict[int, NDArray[np.float32]] = {}
    try:
        for index in range(len(offsets) - 1):
            prompt = tokens[offsets[index] : offsets[index + 1]].tolist()
            request_id = f"{batch}-score-{index}"
            engine.add_request(request_id, tokens_input(prompt), params)
            order[request_id] = index
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    index = order[output.request_id]
                    expected = tokens[offsets[index] + 1 : offsets[index + 1]]
                    scores[index] = _log_probs(output.prompt_logprobs, expected)
    except (ValueError, VLLMValidationError) as error:
        raise EngineRequestError(f"vLLM refuses the request: {error}") from error
    finally:
        engine.abort_request(list(order))
    return np.concatenate([scores[index] for index in range(len(order))])


def _log_probs(flat: Any, expected: NDArray[np.int32]) -> NDArray[np.float32]:
    """vLLM's flat prompt log-probs: nothing for the first token, one entry for every other."""
    ids = np.asarray(flat.token_ids, dtype=np.int32)
    if ids.shape != expected.shape or (ids != expected).any():
        raise RolloutDataError(
            f"vLLM scored {len(ids)} tokens, expected the prompt's {len(expected)} after the first"
        )
    return np.asarray(flat.logprobs, dtype=np.float32)
