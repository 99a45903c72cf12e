# SPDX-License-Identifier: Apache-2.0
"""Plain parts of a checkpoint: the run's state, the disk's room, ranges as rectangles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.checkpoint.free_space import GIB, Room, room_for
from megatron.rl.checkpoint.rectangles import rectangles
from megatron.rl.checkpoint.run_state import RunState
from megatron.rl.errors import UserError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)  # fmt: skip
STATE = RunState(step=12, rollout=3, policy_version=3, config_digest="abc")


@given(further=st.dictionaries(st.text(), PLAIN), score=st.none() | st.floats(0, 1))
def test_a_run_state_comes_back_equal(further: dict[str, Any], score: float | None) -> None:
    order = np.random.default_rng([7, 0])
    order.random(3)
    state = RunState(
        step=12,
        rollout=3,
        policy_version=3,
        config_digest="abc",
        epoch=1,
        epoch_step=2,
        best_score=score,
        minibatch_order=order.bit_generator.state,
        counters={"vetoed": 2**40},
        further=further,
    )
    back = RunState.from_json(state.to_json(), "run.json")
    assert back == state
    again = np.random.default_rng()
    again.bit_generator.state = dict(back.minibatch_order)
    assert (again.permutation(50) == order.permutation(50)).all()


@pytest.mark.parametrize(
    "value", [float("nan"), np.float32(1), {1: "a number as a key"}, (1, 2), Path(".")]
)
def test_what_json_would_change_is_refused(value: object) -> None:
    state = RunState(1, 1, 1, "d", further={"x": value})  # type: ignore[dict-item]
    with pytest.raises((ValueError, TypeError)):
        state.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, "step"),
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"counters": {"a": "b"}}, "counters"),
        ({"prompts": []}, "prompts"),
        ({"best_score": "high"}, "best_score"),
        ({"later": 1}, "another version"),
    ],
)
def test_other_fields_are_refused(change: dict[str, Any], message: str) -> None:
    fields = json.loads(STATE.to_json()) | change
    with pytest.raises(UserError, match=message):
        RunState.from_json(json.dumps(fields), "run.json")


@given(text=st.text(max_size=50) | PLAIN.map(json.dumps))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        RunState.from_json(text, "run.json")
    assert str(caught.value).startswith("run.json")


def test_missing_fields_have_their_defaults_or_are_named() -> None:
    fields = json.loads(STATE.to_json())
    del fields["epoch"]
    assert RunState.from_json(json.dumps(fields), "run.json") == STATE
    del fields["step"]
    with pytest.raises(UserError, match="lacks the field step"):
        RunState.from_json(json.dumps(fields), "run.json")


def test_room_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    room = room_for(tmp_path / "not" / "yet", 1000, 0.5)
    assert room.needed > 1000 and room.reserve == GIB // 2 and room.free > 0
    assert not Room(needed=2, reserve=1, free=2).enough and Room(2, 1, 3).enough
    huge = room_for(tmp_path, 1 << 60, 1.0)
    assert not huge.enough and "checkpoint.min_free_gib" in huge.shortage(tmp_path)


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    cut=st.tuples(st.integers(0, 49), st.integers(0, 49)),
    limit=st.integers(1, 60),
)
def test_rectangles_cover_the_range_in_order(
    rows: int, columns: int, cut: tuple[int, int], limit: int
) -> None:
    start, stop = (min(edge, rows * columns) for edge in sorted(cut))
    matrix = np.arange(rows * columns).reshape(rows, columns)
    covered = []
    for part in rectangles(start, stop, columns, limit):
        block = matrix[part.row : part.row + part.height, part.column : part.column + part.width]
        assert block.shape == (part.height, part.width)
        assert block.size <= max(limit, columns)
        assert block.flat[0] == part.start
        covered += block.flatten().tolist()
    assert covered == list(range(start, stop))


def test_without_a_limit_there_are_at_most_three() -> None:
    assert len(list(rectangles(3, 47, 10, 1000))) == 3
