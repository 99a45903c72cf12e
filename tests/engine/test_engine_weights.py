# SPDX-License-Identifier: Apache-2.0
"""The worker checks every update for itself, whatever its client or a transport leaves out."""

from typing import Any

import pytest

from megatron.rl.rollout.checkpoint_index import CheckpointIndex, TensorInfo
from megatron.rl.rollout.errors import WeightNamesError
from megatron.rl.rollout.json_array import json_array
from megatron.rl.rollout.wire import Message
from megatron.rl.rollout.worker.engine_weights import EngineWeights

NAMES = ["a.q_proj.weight", "a.norm.weight"]
INDEX = CheckpointIndex({name: TensorInfo("BF16", (4, 4)) for name in NAMES}, frozenset(), 4)


class RecordedLLM:
    """Writes down what a vLLM would be told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cache_is_reset = True

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.cache_is_reset


@pytest.fixture
def llm() -> RecordedLLM:
    return RecordedLLM()


@pytest.fixture
def weights(llm: RecordedLLM) -> EngineWeights:
    return EngineWeights(llm, INDEX)


def start(names: list[str]) -> Message:
    return Message("start_update", {}, {"names": json_array(names)})


def bucket(*names: str) -> Message:
    return Message("update_bucket", {}, {"update_info": json_array({"names": names})})


FINISH = Message("finish_update", {"version": 7, "digests": False})


def test_an_update_is_these_calls_in_this_order(llm: RecordedLLM, weights: EngineWeights) -> None:
    scaled = bucket(NAMES[0], f"{NAMES[0]}_scale_inv")
    for message in (start(NAMES), scaled, bucket(NAMES[1]), FINISH):
        assert weights.knows(message.kind)
        weights.answer(message)
    assert llm.calls == [
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
    ]
    assert weights.version == 7


@pytest.mark.parametrize("names", [NAMES[:1], [*NAMES, "b.weight"], [*NAMES, NAMES[0]]])
def test_wrong_names_touch_nothing(
    llm: RecordedLLM, weights: EngineWeights, names: list[str]
) -> None:
    with pytest.raises(WeightNamesError):
        weights.answer(start(names))
    assert llm.calls == []


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([start(NAMES), bucket(NAMES[0]), FINISH], r"without a\.norm\.weight"),
        ([start(NAMES), bucket(NAMES[0]), bucket(NAMES[0])], "came twice"),
        ([start(NAMES), bucket("b.weight")], "not announced"),
        ([bucket(NAMES[0])], "outside an update"),
        ([FINISH], "without a start"),
    ],
)
def test_what_is_not_whole_is_never_put_into_effect(
    llm: RecordedLLM, weights: EngineWeights, messages: list[Message], reason: str
) -> None:
    for message in messages[:-1]:
        weights.answer(message)
    with pytest.raises(RuntimeError, match=reason):
        weights.answer(messages[-1])
    assert "finish_weight_update" not in llm.calls and weights.version == 0


def test_a_prefix_cache_that_stays_is_an_error(llm: RecordedLLM, weights: EngineWeights) -> None:
    llm.cache_is_reset = False
    for message in (start(NAMES), bucket(*NAMES)):
        weights.answer(message)
    with pytest.raises(RuntimeError, match="prefix cache"):
        weights.answer(FINISH)
    assert weights.version == 0
