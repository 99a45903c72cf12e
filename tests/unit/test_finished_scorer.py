# SPDX-License-Identifier: Apache-2.0
"""Sequences are scored in the background, each once, at their own places."""

import time

import numpy as np
import pytest

from megatron.rl.data.prompt_batch import pack_prompts
from megatron.rl.rewards.finished_scorer import FinishedScorer
from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_pool import ScoringFailed, ScoringPool
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns
from tests.unit.scripted_task import prompt

SPEC = TaskSpec("tests.unit.scripted_task:ScriptedTask")
# A response is one token, its place in this list.
TEXTS = ["0.25", "py:import time; time.sleep(60)", "0.5", "1", "x", "0.75"]
PROMPTS = pack_prompts([[1], [2]], [10, 11], [prompt(0), prompt(1)])


def decode(tokens):
    return "".join(TEXTS[token] for token in tokens)


def rollouts():
    count = len(TEXTS)
    return Rollouts(
        prompt_index=np.arange(count, dtype=np.int32) // 3,
        response_tokens=np.arange(count, dtype=np.int32),
        response_offsets=np.arange(count + 1, dtype=np.int64),
        log_probs=np.zeros(count, dtype=np.float32),
        topk=TopKColumns.encode(np.zeros((count, 0), np.int64), np.zeros((count, 0)), 8, "fp24"),
        policy_versions=np.zeros(count, dtype=np.int32),
        finished=np.ones(count, dtype=np.bool_),
        aborted=np.zeros(count, dtype=np.bool_),
        generation_s=0.0,
    )


def finished(*index):
    places = np.array(index)
    return FinishedSequences(places, rollouts().select(places))


def test_scoring_does_not_hold_up_who_delivers():
    limits = ScoringLimits(workers=2, timeout_s=1.5)
    with ScoringPool(SPEC, limits) as pool:
        pool.start()
        with FinishedScorer(pool, decode, PROMPTS, len(TEXTS)) as scorer:
            started = time.monotonic()
            scorer.score(finished(4, 1))
            scorer.score(finished(3))
            # The hanging response is still running: nobody has waited for it.
            assert time.monotonic() - started < limits.timeout_s
            assert scorer.timeouts == 0
            scorer.finish(rollouts())
    np.testing.assert_array_equal(scorer.scores, [0.25, 0, 0.5, 1, 0, 0.75])
    assert scorer.answers == ["0.25", None, "0.5", None, None, "0.75"]
    assert (scorer.failures, scorer.timeouts) == (2, 1)
    assert scorer.first_error is not None and "ValueError" in scorer.first_error
    assert scorer.seconds >= limits.timeout_s


def test_what_cannot_be_scored_is_an_error_when_it_is_waited_for():
    pool = ScoringPool(SPEC)
    pool.close()
    with FinishedScorer(pool, decode, PROMPTS, len(TEXTS)) as scorer:
        scorer.score(finished(0))
        with pytest.raises(ScoringFailed, match="closed"):
            scorer.finish(rollouts())
