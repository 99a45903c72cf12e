# SPDX-License-Identifier: Apache-2.0
"""An engine that is replaced during an update makes all ranks send the weights again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.parallel.spawn import run_ranks

CONFIG = {
    "run": {"device": "cpu"},
    "model": {"path": "unused"},
    "task": {"name": "unused"},
    "parallel": {"data": 2},
    "rollout": {"engines_per_node": 2},
    "bridge": {"certificate": "digests"},
}


def lose_weights_while_sending_and_scoring(rank: int, world_size: int) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron.rl.config import parse_config
    from megatron.rl.rollout.errors import WeightsLost
    from megatron.rl.rollout.from_config import run_topology
    from megatron.rl.rollout.protocol import WeightsReport
    from megatron.rl.weights.bridge import WeightBridge
    from megatron.rl.weights.certificate import ProbeResult

    seen: dict[str, Any] = {"gathered": 0, "sent": [], "scored": 0}

    class Policy:
        """Its tensors are one collective operation."""

        class plan:
            tensors = ()

        def hf_tensors(self, **arguments: object) -> Iterator[tuple[str, object]]:
            dist.barrier()
            seen["gathered"] += 1
            yield "weight", None

    class Engine:
        def weight_slot(self, name: str, shape: object) -> None:
            return None

        def update_weights(self, tensors: Any, version: int, shapes: object) -> WeightsReport:
            seen["sent"].append(version)
            if rank == 1 and len(seen["sent"]) == 1:
                raise WeightsLost("replaced before the first tensor")
            assert len(list(tensors)) == 1
            return WeightsReport(version, 1, 10, 0.0, 1, ())

        def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
            seen["scored"] += 1
            if rank == 1 and seen["scored"] == 1:
                raise WeightsLost("replaced while scoring")
            return [np.zeros(1, dtype=np.float32)]

    class Probe:
        sequences = (np.zeros(2, dtype=np.int32),)

        def compare(self, scores: dict[int, Any]) -> ProbeResult:
            assert list(scores) == [rank]
            return ProbeResult(0.0, 0.0, 1, 0)

    config = parse_config(CONFIG)
    bridge = WeightBridge(config, Policy(), run_topology(config), Engine())  # type: ignore[arg-type]
    bridge._probe = Probe()  # type: ignore[assignment]
    seen["bytes"] = bridge.update(version=7).nbytes
    return seen


def test_a_replaced_engine_gets_the_weights_again() -> None:
    first, second = run_ranks(lose_weights_while_sending_and_scoring, 2)
    assert first == {"gathered": 3, "sent": [7, 7, 7], "scored": 3, "bytes": 10}
    assert second == {"gathered": 3, "sent": [7, 7, 7], "scored": 2, "bytes": 10}
