# SPDX-License-Identifier: Apache-2.0
"""What tests/parallel/test_offload.py cannot see: the optimizer's way to the host and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoints import QWEN3_MOE, write_checkpoint
from tests.parallel.offload_case import STEPS, Run, train
from tests.parallel.spawn import run_ranks


def train_on_gpu(
    rank: int, world_size: int, path: str, dtype: torch.dtype, store: str
) -> tuple[Run, Run, list[int]]:
    """The same steps with and without; and the device memory in use after each run."""
    from megatron.core import parallel_state

    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    runs, used = [], []
    for offload in (False, True):
        runs.append(train(path, {"data": world_size}, dtype, offload=offload))
        parallel_state.destroy_model_parallel()
        used.append(torch.cuda.memory_allocated())
    return runs[0], runs[1], used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_optimizer_goes_to_the_host_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    path = str(write_checkpoint(tmp_path / "moe", QWEN3_MOE))
    outcome: list[Any] = run_ranks(
        train_on_gpu, 1, path, dtype, str(tmp_path / "store"), timeout_s=300
    )
    plain, offloaded, _ = outcome[0]
    assert offloaded.grad_norms == plain.grad_norms
    full = plain.gradient_bytes[0]
    assert offloaded.gradient_bytes == [full, 0, full, 0, 0]
    released, restored, *later = offloaded.host_bytes
    assert later == [released] * (STEPS - 1)
    # Two float32 moments a parameter go to the host at least; only step counters live there.
    assert released > 100 * max(restored, 1)
    assert plain.weights.keys() == offloaded.weights.keys()
    for name, tensor in plain.weights.items():
        assert torch.equal(offloaded.weights[name], tensor), name
        assert torch.equal(offloaded.weights_meanwhile[name], tensor), name
