# SPDX-License-Identifier: Apache-2.0
"""Settings, requests and rollouts refuse what they cannot mean."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.rl.rollout.errors import EngineRequestError, RolloutDataError
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings, sequence_seeds
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"top_p": 0.95}, "support"), ({"top_k": 5}, "support"), ({"min_p": 0.1}, "support")],
)
def test_what_changes_the_support_is_refused_for_training_only(change, reason):
    with pytest.raises(EngineRequestError, match=reason):
        SamplingSettings(max_tokens=4, **change)
    SamplingSettings(max_tokens=4, training=False, **change)


def test_greedy_is_for_evaluation_only():
    with pytest.raises(EngineRequestError, match="temperature 0"):
        SamplingSettings(max_tokens=4, temperature=0.0)
    SamplingSettings(max_tokens=4, temperature=0.0, training=False)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": 0.001},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 2.5},
        {"top_logprobs": -1},
        {"topk_precision": "bfloat16"},
        {"seed": -1},
        {"seed": 2**63},
        {"stop_token_ids": (-1,)},
        {"top_p": 0.0, "training": False},
        {"top_p": 1.5, "training": False},
        {"top_k": -1, "training": False},
        {"min_p": 2.0, "training": False},
    ],
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ValueError):
        SamplingSettings(**{"max_tokens": 4, **change})


def test_requests_from_lists():
    request = GenerationRequest.from_lists([[1, 2, 3], [4]], 2, SamplingSettings(max_tokens=1))
    assert (request.num_prompts, request.num_sequences) == (2, 4)
    assert request.prompt_tokens.dtype == np.int32
    np.testing.assert_array_equal(request.prompt_offsets, [0, 3, 4])
    np.testing.assert_array_equal(request.prompt(1), [4])
    assert request.seeds() is None


@pytest.mark.parametrize(("prompts", "samples"), [([], 1), ([[1], []], 1), ([[1]], 0)])
def test_requests_without_content_are_refused(prompts, samples):
    with pytest.raises(EngineRequestError):
        GenerationRequest.from_lists(prompts, samples, SamplingSettings(max_tokens=1))


def test_request_arrays_are_checked():
    settings = SamplingSettings(max_tokens=1)
    tokens, offsets = np.array([1, 2], dtype=np.int32), np.array([0, 2], dtype=np.int64)
    with pytest.raises(EngineRequestError, match="int32"):
        GenerationRequest(tokens.astype(np.int64), offsets, 1, settings)
    with pytest.raises(EngineRequestError, match="rise from 0 to 2"):
        GenerationRequest(tokens, np.array([0, 1], dtype=np.int64), 1, settings)


def test_seeds_are_known_numbers_and_depend_on_seed_and_index_only():
    # SplitMix64 from state 0: 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, each without its last bit.
    np.testing.assert_array_equal(
        sequence_seeds(0, 0, 2), [0xE220A8397B1DCDAF >> 1, 0x6E789E6AA1B965F4 >> 1]
    )
    whole = sequence_seeds(5, 0, 1000)
    np.testing.assert_array_equal(whole[300:310], sequence_seeds(5, 300, 10))
    assert len(np.unique(np.concatenate([whole, sequence_seeds(6, 0, 1000)]))) == 2000
    assert whole.min() >= 0


def good_rollouts() -> Rollouts:
    """Two sequences of 2 and 1 tokens, K = 2; the last token has one top entry only."""
    return Rollouts(
        prompt_index=np.array([0, 0], dtype=np.int32),
        response_tokens=np.array([3, 1, 0], dtype=np.int32),
        response_offsets=np.array([0, 2, 3], dtype=np.int64),
        log_probs=np.array([-0.5, -3.0, 0.0], dtype=np.float32),
        topk=TopKColumns.encode(
            np.array([[3, 2], [0, 4], [0, -1]]),
            np.array([[-0.5, -2.0], [-1.0, -2.0], [0.0, -np.inf]]),
            vocab_size=5,
        ),
        policy_versions=np.array([3, 3, 2], dtype=np.int32),
        finished=np.array([True, False]),
        aborted=np.array([False, False]),
        generation_s=0.1,
    )


def test_good_rollouts_pass():
    rollouts = good_rollouts()
    rollouts.validate(vocab_size=5)
    np.testing.assert_array_equal(rollouts.lengths, [2, 1])
    np.testing.assert_array_equal(rollouts.response(0), [3, 1])
    assert (rollouts.num_sequences, rollouts.num_tokens) == (2, 3)


def changed(array: np.ndarray, index: object, value: float) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("log_probs", 1, np.nan, "NaN"),
        ("log_probs", 1, -np.inf, "no log-probs"),
        ("log_probs", 1, -9999.0, "sentinel"),
        ("log_probs", 1, 0.5, "no log-probs"),
        ("policy_versions", 0, -1, "negative policy versions"),
        ("aborted", 0, True, "both finished and aborted"),
        ("response_tokens", 0, 5, "outside the vocabulary"),
        ("response_tokens", 0, -1, "outside the vocabulary"),
        ("response_offsets", 1, 4, "rise from 0"),
        ("response_offsets", 2, 2, "rise from 0"),
        ("prompt_index", 0, -1, "negative"),
    ],
)
def test_bad_values_are_refused(field, index, value, message):
    rollouts = good_rollouts()
    bad = replace(rollouts, **{field: changed(getattr(rollouts, field), index, value)})
    with pytest.raises(RolloutDataError, match=message):
        bad.validate(vocab_size=5)


@pytest.mark.parametrize(
    ("array", "index", "value", "message"),
    [
        ("log_probs", (0, 1), np.nan, "NaN among the top-K"),
        ("log_probs", (0, 1), -9999.0, "sentinel"),
        ("log_probs", (0, 1), 0.5, "above 0"),
        ("ids_low", (1, 1), 5, r"outside the vocabulary: first at index \(1, 1\)"),
    ],
)
def test_bad_top_entries_are_refused(array, index, value, message):
    rollouts = good_rollouts()
    ids, log_probs = rollouts.topk.decode()
    exact = TopKColumns.encode(ids, log_probs, vocab_size=5, precision="float32")
    topk = replace(exact, **{array: changed(getattr(exact, array), index, value)})
    with pytest.raises(RolloutDataError, match=message):
        replace(rollouts, topk=topk).validate(vocab_size=5)


def test_rollouts_as_arrays_and_back():
    rollouts = good_rollouts()
    arrays = rollouts.arrays()
    again = Rollouts.from_arrays(arrays, rollouts.generation_s)
    assert again.arrays().keys() == arrays.keys() and again.generation_s == rollouts.generation_s
    for name, array in again.arrays().items():
        np.testing.assert_array_equal(array, arrays[name])
    for wrong in ({**arrays, "rewards": arrays["log_probs"]}, dict(list(arrays.items())[:-1])):
        with pytest.raises(RolloutDataError, match="no rollouts"):
            Rollouts.from_arrays(wrong, 0.0)


def test_the_policy_version_is_the_newest():
    assert good_rollouts().policy_version == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("log_probs", np.zeros(2, dtype=np.float32)),
        ("log_probs", np.zeros(3, dtype=np.float64)),
        ("topk", good_rollouts().topk.take([0, 1])),
        ("policy_versions", np.zeros(2, dtype=np.int32)),
        ("policy_versions", np.zeros(3, dtype=np.int64)),
        ("aborted", np.array([True])),
        ("finished", np.array([True])),
        ("prompt_index", np.zeros(3, dtype=np.int32)),
    ],
)
def test_lengths_and_types_must_agree(field, value):
    with pytest.raises(RolloutDataError):
        replace(good_rollouts(), **{field: value}).validate()
