# SPDX-License-Identifier: Apache-2.0
"""Continue responses that an abort cut off, possibly with newer weights.

    partial = engine.generate(request)          # abort() was called meanwhile
    engine.update_weights(tensors, version)
    follow_up = resume_request(request, partial)
    rollouts = merge_resumed(partial, engine.generate(follow_up))

A response then carries the log-probs of whichever weights sampled each token, and their version.
"""

import numpy as np

from .errors import EngineRequestError, RolloutDataError
from .protocol import GenerationRequest, sequence_seeds
from .rollouts import Rollouts
from .topk_columns import TopKColumns


def resume_request(request: GenerationRequest, partial: Rollouts) -> GenerationRequest | None:
    """The request for the rest of every aborted sequence; None when none was aborted.

    Each aborted sequence becomes a prompt of its own, its prompt followed by what there is of the
    response, with the rest of its token budget. Its seed follows from the old one and from the
    number of tokens kept, so that a repetition gives the same and the random numbers that chose
    these tokens are not used again; a sequence without a token keeps its seed.
    """
    if partial.num_sequences != request.num_sequences:
        raise EngineRequestError(
            f"{partial.num_sequences} rollouts for a request of {request.num_sequences} sequences"
        )
    aborted = np.flatnonzero(partial.aborted)
    if len(aborted) == 0:
        return None
    prompts = [
        np.concatenate([request.prompt(int(partial.prompt_index[b])), partial.response(int(b))])
        for b in aborted
    ]
    kept = partial.lengths[aborted]
    seeds = request.seeds()
    return GenerationRequest(
        prompt_tokens=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=np.cumsum([0, *(len(prompt) for prompt in prompts)], dtype=np.int64),
        samples_per_prompt=1,
        settings=request.settings,
        own_max_tokens=(request.max_tokens()[aborted] - kept).astype(np.int32),
        own_seeds=None if seeds is None else _next_seeds(seeds[aborted], kept),
    )


def merge_resumed(partial: Rollouts, resumed: Rollouts) -> Rollouts:
    """Append to every aborted sequence of `partial` what `resumed` continued it with."""
    aborted = np.flatnonzero(partial.aborted)
    if len(aborted) != resumed.num_sequences:
        raise RolloutDataError(
            f"{resumed.num_sequences} continuations for {len(aborted)} aborted sequences"
        )
    lengths = partial.lengths
    lengths[aborted] += resumed.lengths
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Stable: the tokens of one sequence keep their order, the old part before the new one.
    owner = [
        np.repeat(np.arange(partial.num_sequences), partial.lengths),
        np.repeat(aborted, resumed.lengths),
    ]
    rows = np.argsort(np.concatenate(owner), kind="stable")
    finished, still_aborted = partial.finished.copy(), partial.aborted.copy()
    finished[aborted], still_aborted[aborted] = resumed.finished, resumed.aborted
    return Rollouts(
        prompt_index=partial.prompt_index,
        response_tokens=np.concatenate([partial.response_tokens, resumed.response_tokens])[rows],
        response_offsets=offsets,
        log_probs=np.concatenate([partial.log_probs, resumed.log_probs])[rows],
        topk=TopKColumns.concatenate([partial.topk, resumed.topk]).take(rows),
        policy_versions=np.concatenate([partial.policy_versions, resumed.policy_versions])[rows],
        finished=finished,
        aborted=still_aborted,
        generation_s=partial.generation_s + resumed.generation_s,
    )


def _next_seeds(seeds: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Output number `kept` of the generator that starts from each seed; the seed itself at 0."""
    following = [
        seed if count == 0 else sequence_seeds(int(seed), int(count), 1)[0]
        for seed, count in zip(seeds, kept, strict=True)
    ]
    return np.array(following, dtype=np.int64)
