# SPDX-License-Identifier: Apache-2.0
"""The follow-up request of an aborted one, and the two answers joined, worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.rl.rollout.errors import EngineRequestError, RolloutDataError
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings, sequence_seeds
from megatron.rl.rollout.resume import merge_resumed, resume_request
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns

REQUEST = GenerationRequest.from_lists(
    [[1, 2], [3]], 2, SamplingSettings(max_tokens=5, top_logprobs=1, seed=9), 10
)


def rollouts(prompt_index, responses, finished, aborted, version) -> Rollouts:
    """Each token's log-prob and top entry follow from the token and the version."""
    tokens = np.array([t for response in responses for t in response], dtype=np.int32)
    log_probs = -(tokens + version / 8).astype(np.float32)
    return Rollouts(
        prompt_index=np.array(prompt_index, dtype=np.int32),
        response_tokens=tokens,
        response_offsets=np.cumsum([0, *map(len, responses)], dtype=np.int64),
        log_probs=log_probs,
        topk=TopKColumns.encode(tokens[:, None] + 100, log_probs[:, None], 1000),
        policy_versions=np.full(len(tokens), version, dtype=np.int32),
        finished=np.array(finished),
        aborted=np.array(aborted),
        generation_s=1.5,
    )


# Finished; aborted after 2 tokens; aborted before the first; cut at the limit.
PARTIAL = rollouts(
    [0, 0, 1, 1],
    [[5, 6], [7, 8], [], [11, 12, 13, 14, 15]],
    [True, False, False, False],
    [False, True, True, False],
    version=3,
)


def test_the_follow_up_asks_for_the_rest_of_what_was_aborted():
    follow_up = resume_request(REQUEST, PARTIAL)
    assert follow_up is not None
    assert (follow_up.num_prompts, follow_up.samples_per_prompt) == (2, 1)
    np.testing.assert_array_equal(follow_up.prompt(0), [1, 2, 7, 8])
    np.testing.assert_array_equal(follow_up.prompt(1), [3])
    np.testing.assert_array_equal(follow_up.max_tokens(), [3, 5])
    assert follow_up.settings == REQUEST.settings
    # Sequence 1 goes on with its generator's second following output, sequence 2 starts afresh.
    of_first, of_second = sequence_seeds(9, 11, 2)
    expected = [sequence_seeds(int(of_first), 2, 1)[0], of_second]
    np.testing.assert_array_equal(follow_up.seeds(), expected)


def test_nothing_aborted_needs_no_follow_up():
    complete = replace(PARTIAL, aborted=np.zeros(4, dtype=bool))
    assert resume_request(REQUEST, complete) is None
    with pytest.raises(EngineRequestError, match="request of 4"):
        resume_request(REQUEST, PARTIAL.select(np.array([0])))


def test_without_a_seed_there_is_none():
    request = replace(REQUEST, settings=replace(REQUEST.settings, seed=None))
    assert resume_request(request, PARTIAL).seeds() is None


def test_the_parts_are_joined_token_by_token():
    resumed = rollouts([0, 1], [[20, 21], [22]], [True, False], [False, True], version=4)
    merged = merge_resumed(PARTIAL, resumed)
    merged.validate(1000)
    responses = [merged.response(b).tolist() for b in range(4)]
    assert responses == [[5, 6], [7, 8, 20, 21], [22], [11, 12, 13, 14, 15]]
    np.testing.assert_array_equal(merged.policy_versions, [3] * 4 + [4] * 3 + [3] * 5)
    np.testing.assert_array_equal(merged.finished, [True, True, False, False])
    np.testing.assert_array_equal(merged.aborted, [False, False, True, False])
    np.testing.assert_array_equal(merged.prompt_index, [0, 0, 1, 1])
    expected = -(merged.response_tokens + merged.policy_versions / 8)
    np.testing.assert_array_equal(merged.log_probs, expected)
    ids, log_probs = merged.topk.decode()
    np.testing.assert_array_equal(ids[:, 0], merged.response_tokens + 100)
    np.testing.assert_array_equal(log_probs[:, 0], expected)
    assert merged.generation_s == 3.0 and merged.policy_version == 4


def test_a_second_abort_is_resumed_like_the_first():
    resumed = rollouts([0, 1], [[20], [22]], [False, True], [True, False], version=4)
    follow_up = resume_request(REQUEST, PARTIAL)
    again = resume_request(follow_up, resumed)
    np.testing.assert_array_equal(again.prompt(0), [1, 2, 7, 8, 20])
    np.testing.assert_array_equal(again.max_tokens(), [2])
    rest = rollouts([0], [[30, 31]], [False], [False], version=5)
    merged = merge_resumed(PARTIAL, merge_resumed(resumed, rest))
    assert merged.response(1).tolist() == [7, 8, 20, 30, 31]
    assert merged.policy_versions[2:7].tolist() == [3, 3, 4, 5, 5]
    assert not merged.aborted.any()


def test_continuations_of_something_else_are_refused():
    with pytest.raises(RolloutDataError, match="1 continuations for 2"):
        merge_resumed(PARTIAL, rollouts([0], [[20]], [True], [False], version=4))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("own_max_tokens", np.array([1, 1, 1], dtype=np.int32)),
        ("own_max_tokens", np.array([1, 1, 1, 0], dtype=np.int32)),
        ("own_max_tokens", np.array([1, 1, 1, 1], dtype=np.int64)),
        ("own_seeds", np.array([1, 1, 1, -1], dtype=np.int64)),
    ],
)
def test_numbers_per_sequence_must_fit_the_request(name, values):
    with pytest.raises(EngineRequestError, match=name):
        replace(REQUEST, **{name: values})
