# SPDX-License-Identifier: Apache-2.0
"""Reward terms: DAPO's soft overlong penalty, format and length, and what is refused."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.config import parse_config
from megatron.rl.errors import UserError
from megatron.rl.rewards.reward_terms import (
    RewardConfig,
    ShapedRewards,
    require_answers,
    shape_rewards,
    soft_overlong,
)


def test_soft_overlong_at_its_corners() -> None:
    """L_max 100, L_cache 20: by hand from DAPO's Eq. 13."""
    lengths = np.array([0, 1, 79, 80, 81, 90, 99, 100, 101, 500])
    penalty = soft_overlong(lengths, 100, 20)
    assert penalty.tolist() == [0, 0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1]
    assert not np.signbit(penalty[:4]).any(), "0, not -0"


def test_a_buffer_as_long_as_the_response_penalises_from_the_first_token() -> None:
    assert soft_overlong(np.array([0, 1, 4]), 4, 4).tolist() == [0, -0.25, -1]


def test_a_buffer_beyond_the_longest_response_is_refused() -> None:
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="buffer of 1 to 100"):
            soft_overlong(np.array([1]), 100, buffer)


@given(st.data())
def test_soft_overlong_is_the_formula(data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, 40_000))
    buffer = data.draw(st.integers(1, longest))
    length = data.draw(st.integers(0, 2 * longest))
    if length <= longest - buffer:
        expected = Fraction(0)
    elif length <= longest:
        expected = Fraction(longest - buffer - length, buffer)
    else:
        expected = Fraction(-1)
    assert soft_overlong(np.array([length]), longest, buffer)[0] == float(expected)


def test_each_term_is_added_once_at_its_own_place() -> None:
    config = RewardConfig(
        overlong_buffer_tokens=4, overlong_penalty=2.0, format_penalty=0.5, length_penalty=0.25
    )
    scores = np.array([1.0, 0.0, 0.5])
    shaped = shape_rewards(config, scores, ("7", None, "x"), np.array([4, 8, 7]), max_tokens=8)
    assert {name: term.tolist() for name, term in shaped.terms.items()} == {
        "overlong": [0.0, -2.0, -1.5],
        "format": [0.0, -0.5, 0.0],
        "length": [-0.125, -0.25, -0.21875],
    }
    assert shaped.rewards.tolist() == [0.875, -2.75, -1.21875]
    assert scores.tolist() == [1.0, 0.0, 0.5], "scores are not changed"


def test_without_terms_rewards_are_the_scores() -> None:
    scores = np.array([0.25, 1.0])
    shaped = shape_rewards(RewardConfig(), scores, (None, None), np.array([8, 8]), 8)
    assert shaped.terms == {} and shaped.rewards is scores


def test_selected_and_joined_rewards_keep_their_terms() -> None:
    shaped = ShapedRewards(np.arange(4.0), {"length": -np.arange(4.0) / 8})
    parts = [shaped.select(np.array([2, 3])), shaped.select(np.array([0]))]
    joined = ShapedRewards.join(parts)
    assert joined.scores.tolist() == [2, 3, 0]
    assert joined.terms["length"].tolist() == [-0.25, -0.375, 0]


class Silent:
    name = "silent"


class Answering(Silent):
    def answer(self, response_text: str) -> str | None:
        return response_text or None


def test_the_format_term_needs_a_task_that_extracts_answers() -> None:
    config = RewardConfig(format_penalty=0.5)
    with pytest.raises(UserError, match=r"format_penalty is 0.5, expected 0: task silent has no"):
        require_answers(config, Silent())  # type: ignore[arg-type]
    require_answers(config, Answering())  # type: ignore[arg-type]
    require_answers(RewardConfig(length_penalty=1.0), Silent())  # type: ignore[arg-type]


def parse(**sections: dict[str, Any]) -> RewardConfig:
    tree = {"model": {"path": "x"}, "task": {"name": "y"}}
    return parse_config(tree | sections).reward


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"rollout": {"max_response_tokens": 100}, "reward": {"overlong_buffer_tokens": 200}},
            r"overlong_buffer_tokens: expected 0 \(off\) to rollout.max_response_tokens \(100\)",
        ),
        ({"reward": {"overlong_buffer_tokens": -1}}, "overlong_buffer_tokens: expected 0"),
        ({"reward": {"overlong_penalty": 0.5}}, "overlong_penalty: expected 1.0: it has no effect"),
        (
            {"reward": {"overlong_buffer_tokens": 9, "overlong_penalty": 0.0}},
            "overlong_penalty: expected a positive number",
        ),
        ({"reward": {"format_penalty": -0.1}}, "format_penalty: expected a number of 0 or more"),
        ({"reward": {"length_penalty": float("nan")}}, "length_penalty: expected a number"),
        ({"reward": {"length_penalty": float("inf")}}, "length_penalty: expected a number"),
        ({"rollout": {"refill_rounds": -1}}, "refill_rounds: expected 0"),
        ({"rollout": {"refill_policy": "keep"}}, "refill_policy: expected smaller: it has no"),
        (
            {"rollout": {"refill_rounds": 2, "group_size": 1}},
            "group_size: expected at least 2 with rollout.refill_rounds",
        ),
    ],
)
def test_what_is_out_of_range_or_without_effect_is_refused(
    sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        parse(**sections)


def test_the_whole_response_may_be_the_buffer() -> None:
    config = parse(rollout={"max_response_tokens": 100}, reward={"overlong_buffer_tokens": 100})
    assert config.terms == ("overlong",)
