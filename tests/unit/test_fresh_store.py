# SPDX-License-Identifier: Apache-2.0
"""Ranks that are started again in the same store meet each other, and not those before them."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from megatron.rl.fresh_store import fresh_store

TIMEOUT = timedelta(seconds=20)


def meet(store: Store, order: list[int]) -> list[Store]:
    """Start the ranks in this order, one well after the other; return what they get, by rank."""
    found: dict[int, Future[Store]] = {}
    with ThreadPoolExecutor(len(order)) as pool:
        for rank in order:
            found[rank] = pool.submit(fresh_store, store, rank, len(order), TIMEOUT)
            time.sleep(0.1)
        return [found[rank].result() for rank in sorted(found)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_every_attempt_has_a_part_of_its_own(order: list[int]) -> None:
    store = HashStore()
    for attempt in range(3):
        parts = meet(store, order)
        assert not any(part.check(["address of rank 0"]) for part in parts)
        parts[0].set("address of rank 0", str(attempt))
        assert {part.get("address of rank 0") for part in parts} == {str(attempt).encode()}


def test_a_rank_that_died_while_it_joined_is_not_waited_for() -> None:
    store = HashStore()
    store.set("asks/1", "of a process that is gone")
    parts = meet(store, [0, 1])
    parts[1].set("key", "value")
    assert parts[0].get("key") == b"value" and isinstance(parts[0], PrefixStore)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 did not join in 0\.1 s"):
        fresh_store(HashStore(), 0, 3, timedelta(seconds=0.1))
