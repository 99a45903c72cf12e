# SPDX-License-Identifier: Apache-2.0
"""A part of the store that ranks meet in which no rank before them has written to.

torchrun keeps its store when it restarts the ranks: there they find the addresses of ranks that are
gone, and try to connect to those (pytorch/pytorch#135712). Its count of restarts does not help,
every node has its own.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

_POLL_S = 0.02


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the same new part of the store on every rank. Collective.

    Rank 0 names it and tells each rank that asks; a rank asks under a name of its own, so that it
    takes no answer that an earlier rank 0 has left.

    Raises:
        TimeoutError: ranks did not come.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        _admit(store, name, set(range(1, world_size)), timeout)
        return PrefixStore(name, store)
    own = uuid.uuid4().hex
    store.set(f"asks/{rank}", own)
    store.wait([f"answer/{own}"], timeout)
    name = store.get(f"answer/{own}").decode()
    store.set(f"{name}/joined/{rank}", "")
    return PrefixStore(name, store)


def _admit(store: Store, name: str, missing: set[int], timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    answered: set[str] = set()
    while True:
        missing = {rank for rank in missing if not store.check([f"{name}/joined/{rank}"])}
        if not missing:
            return
        for rank in missing:
            # What is there may be of a rank before it: another answer follows when it has asked.
            if store.check([f"asks/{rank}"]):
                asks = store.get(f"asks/{rank}").decode()
                if asks not in answered:
                    store.set(f"answer/{asks}", name)
                    answered.add(asks)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} did not join in {timeout.total_seconds():g} s")
        time.sleep(_POLL_S)
