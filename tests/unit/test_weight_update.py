# SPDX-License-Identifier: Apache-2.0
"""The order and the failures of weight updates, with nothing at the other end."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron.rl.rollout.checkpoint_index import CheckpointIndex, TensorInfo
from megatron.rl.rollout.client.engine_config import VLLMEngineConfig
from megatron.rl.rollout.errors import EngineDied, EngineError, EngineTimeout, WeightsLost
from megatron.rl.rollout.json_array import json_array
from megatron.rl.rollout.server.weights import ServerWeights
from megatron.rl.rollout.transfer.weight_format import WeightFormat
from megatron.rl.rollout.transfer.weight_transport import SharedMemoryTransport
from megatron.rl.rollout.transfer.weight_update import WeightUpdates
from megatron.rl.rollout.wire import Message

INDEX = CheckpointIndex({"norm.weight": TensorInfo("F32", (3,))}, frozenset(), vocab_size=4)
TENSORS = {"norm.weight": torch.ones(3)}


class Worker:
    """Says yes to everything; `kinds` are the commands that came."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def post(
        self, kind: str, fields: Mapping[str, Any], arrays: Any, stall_timeout_s: float
    ) -> int:
        self.kinds.append(kind)
        return len(self.kinds)

    def answer(self, request_id: int, kind: str, stall_timeout_s: float) -> Message:
        return Message("done", {}, {"digests": json_array([])})


def test_other_weights_of_the_same_version_are_sent_too() -> None:
    config = VLLMEngineConfig("no folder", dtype="float32", device="cpu")
    updates, worker = WeightUpdates(config, INDEX), Worker()
    for _ in range(2):
        # Without shapes nothing is sent before all of it is packed.
        buckets = list(updates.pack(iter(TENSORS.items()), None, "float32"))
        assert buckets == [("norm.weight",)]
        updates.complete(5)
        with pytest.raises(WeightsLost):
            updates.require()
        updates.give(worker)  # type: ignore[arg-type]
        updates.require()
        updates.give(worker)  # type: ignore[arg-type]  # it has them
    assert worker.kinds.count("finish_update") == 2
    assert worker.kinds.count("init_transfer") == 1
    updates.close()


class Server:
    """Fails at one route; `paths` are the requests that came."""

    def __init__(self, failing: Mapping[str, EngineError]) -> None:
        self.paths: list[str] = []
        self._failing = failing

    def post(self, path: str, body: Any, timeout_s: float, **query: str) -> Any:
        self.paths.append(path)
        if path in self._failing:
            raise self._failing[path]


def failing_update(failing: Mapping[str, EngineError]) -> tuple[ServerWeights, Server]:
    """An update in which the first of the failures has to be the one that is reported."""
    server, transport = Server(failing), SharedMemoryTransport()
    weights = ServerWeights(
        server,  # type: ignore[arg-type]
        transport,
        INDEX,
        WeightFormat("float32"),
        bucket_bytes=1 << 20,
        with_digests=False,
        timeout_s=1,
    )
    with pytest.raises(EngineError, match="first"):
        weights.update(TENSORS, None, 1, "run:1")
    weights.close()
    return weights, server


@pytest.mark.parametrize("path", ["/pause", "/init_weight_transfer_engine"])
def test_a_server_that_was_not_touched_samples_on(path: str) -> None:
    failing = {path: EngineTimeout("first"), "/resume": EngineDied("second")}
    weights, server = failing_update(failing)
    weights.require()
    assert server.paths[-1] == "/resume"


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights"])
def test_a_server_that_may_hold_a_mixture_stays_paused(path: str) -> None:
    weights, server = failing_update({path: EngineTimeout("first")})
    with pytest.raises(WeightsLost, match="half-way"):
        weights.require()
    assert server.paths[-1] == path
