# SPDX-License-Identifier: Apache-2.0
"""Giving up gradients and optimizer between two steps changes nothing, bit for bit.

On CPU Megatron frees and rebuilds the gradient buffers for real; the optimizer's tensors are on
the host already, and their way there and back is tested in tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checkpoints import QWEN3_MOE, write_checkpoint
from tests.parallel.offload_case import STEPS, Run, train
from tests.parallel.spawn import run_ranks


def train_with_and_without(
    rank: int, world_size: int, path: str, dtype: torch.dtype
) -> tuple[Run, Run]:
    """Take the same steps twice on fresh policies, in the second with memory given up between."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.core import parallel_state

    runs = []
    for offload in (False, True):
        runs.append(train(path, {"data": 2, "expert": 2}, dtype, offload=offload))
        parallel_state.destroy_model_parallel()
    return runs[0], runs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_with_memory_given_up_between_equal_those_without(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype
) -> None:
    path = str(write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "moe", QWEN3_MOE))
    outcomes: list[Any] = run_ranks(train_with_and_without, 2, path, dtype)
    for plain, offloaded in outcomes:
        assert offloaded.grad_norms == plain.grad_norms
        assert len(set(plain.grad_norms)) == STEPS, "every step must differ"
        full = plain.gradient_bytes[0]
        assert full > 0
        assert offloaded.gradient_bytes == [full, 0, full, 0, 0]
        # float32 weights are what the optimizer steps on; bfloat16 ones have a float32 copy.
        assert plain.views == (plain.parameters if dtype == torch.float32 else 0)
        assert plain.parameters > 0
    plain, offloaded = outcomes[0]
    assert plain.weights
    assert offloaded.weights.keys() == plain.weights.keys()
    for name, tensor in plain.weights.items():
        assert torch.equal(offloaded.weights[name], tensor), name
        assert torch.equal(offloaded.weights_meanwhile[name], tensor), name
