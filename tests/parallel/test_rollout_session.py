# SPDX-License-Identifier: Apache-2.0
"""Weights are sent again, by all ranks, to an engine that lost them, and only its share repeats."""

from tests.parallel.spawn import run_ranks

CONFIG = {
    "run": {"device": "cpu"},
    "model": {"path": "unused"},
    "task": {"name": "unused"},
    "parallel": {"data": 2},
    "rollout": {"engines_per_node": 2},
}


def lose_weights_twice(rank: int, world_size: int) -> tuple[str | None, list[int], int]:
    from megatron.rl.config import parse_config
    from megatron.rl.exchange import Exchange, TopKForm
    from megatron.rl.rollout.errors import WeightsLost
    from megatron.rl.rollout_session import RolloutSession

    class Bridge:
        """Counts the updates, which every rank takes part in."""

        def __init__(self) -> None:
            self.versions: list[int] = []

        def update(self, version: int) -> None:
            self.versions.append(version)

    calls = 0

    def sample(sampler: object) -> str:
        nonlocal calls
        calls += 1
        if rank == 1 and calls <= 2:
            raise WeightsLost("restarted without weights")
        return f"share of rank {rank}"

    session = RolloutSession(parse_config(CONFIG), note=lambda text: None)
    session._sampler = object()
    layout = session._config.parallel
    session._exchange = Exchange(session._topology, layout, TopKForm(1, 8, "fp24"))
    session._bridge = Bridge()
    result = session._on_engines(sample, version=7)
    return result, session._bridge.versions, calls


def test_lost_weights_are_sent_again() -> None:
    first, second = run_ranks(lose_weights_twice, 2)
    assert first == ("share of rank 0", [7, 7], 1)
    assert second == ("share of rank 1", [7, 7], 3)
