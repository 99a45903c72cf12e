# SPDX-License-Identifier: Apache-2.0
"""From vLLM's K + 1 entries per token to the sampled one and exactly K."""

import numpy as np
import pytest

from megatron.rl.rollout.errors import RolloutDataError
from megatron.rl.rollout.worker.engine_weights import EngineWeights
from megatron.rl.rollout.worker.vllm_sequences import split_columns

# Two tokens, K = 2. The first token, 13, is among the top 2; the second, 382, is not: reading the
# first or the largest entry as the sampled one's would be wrong for one of them.
TOKENS = np.array([13, 382], dtype=np.int32)
IDS = np.array([[13, 7, 13], [382, 13, 8]], dtype=np.int32)
LOG_PROBS = np.array([[-0.75, -0.7, -0.75], [-4.2, -0.71, -1.5]], dtype=np.float32)


def test_sampled_inside_and_outside_of_the_top_k():
    columns = split_columns(TOKENS, IDS, LOG_PROBS, 2)
    np.testing.assert_array_equal(columns.log_probs, LOG_PROBS[:, 0])
    np.testing.assert_array_equal(columns.topk_ids, [[7, 13], [13, 8]])
    np.testing.assert_array_equal(columns.topk_log_probs, LOG_PROBS[:, 1:])


def test_places_without_a_token_are_marked_absent():
    log_probs = LOG_PROBS.copy()
    log_probs[1, 2] = -np.inf
    with pytest.raises(RolloutDataError, match="above the K-th"):
        split_columns(TOKENS, IDS, log_probs, 2)
    ids = IDS.copy()
    ids[1, 0] = ids[1, 1] = 382
    log_probs[1, 0] = log_probs[1, 1]
    columns = split_columns(TOKENS, ids, log_probs, 2)
    np.testing.assert_array_equal(columns.topk_ids, [[7, 13], [382, -1]])
    assert columns.topk_log_probs[1, 1] == -np.inf


def test_k_zero_leaves_the_sampled_column_alone():
    columns = split_columns(
        TOKENS, TOKENS[:, None], np.array([[-1.0], [-2.0]], dtype=np.float32), 0
    )
    assert columns.topk_ids.shape == (2, 0)
    np.testing.assert_array_equal(columns.log_probs, [-1.0, -2.0])


@pytest.mark.parametrize(
    ("index", "new_id", "new_log_prob", "message"),
    [
        ((0, 0), 9, None, "not the sampled token"),
        ((0, 0), None, -0.8, "disagree"),
        ((0, 1), None, -0.9, "sorted"),
        ((1, 0), None, -1.0, "above the K-th"),
        ((1, 2), None, np.nan, "NaN"),
        ((0, 1), 13, None, "disagree"),
    ],
)
def test_another_layout_than_the_known_one_is_refused(index, new_id, new_log_prob, message):
    ids, log_probs = IDS.copy(), LOG_PROBS.copy()
    if new_id is not None:
        ids[index] = new_id
    if new_log_prob is not None:
        log_probs[index] = new_log_prob
    with pytest.raises(RolloutDataError, match=message):
        split_columns(TOKENS, ids, log_probs, 2)


def test_a_wrong_number_of_entries_is_refused():
    with pytest.raises(RolloutDataError, match=r"expected \(2, 3\)"):
        split_columns(TOKENS, IDS[:, :2], LOG_PROBS[:, :2], 2)


def test_a_prefix_cache_that_was_not_reset_is_an_error():
    class LLM:
        def reset_prefix_cache(self) -> bool:
            return False

    weights = EngineWeights.__new__(EngineWeights)
    weights._llm = LLM()
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        weights.reset_prefix_cache()
