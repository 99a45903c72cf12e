# SPDX-License-Identifier: Apache-2.0
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.parallel.spawn import run_ranks


def fail_on_the_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise LookupError("the reason")
    dist.all_reduce(torch.ones(1))  # waits for a peer that is gone


def die_without_a_word(rank: int, world_size: int) -> None:
    os._exit(17)


def hang(rank: int, world_size: int) -> None:
    time.sleep(600)


def test_a_failing_rank_is_reported_and_nobody_is_waited_for() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed:(.|\n)*LookupError: the reason"):
        run_ranks(fail_on_the_last, 2, timeout_s=100.0)
    assert time.monotonic() - start < 60


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 1 died with exit code 17"):
        run_ranks(die_without_a_word, 1)


def test_a_rank_that_hangs_is_stopped() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 1 did not return within 0.1 s"):
        run_ranks(hang, 1, timeout_s=0.1)
