# SPDX-License-Identifier: Apache-2.0
"""A digest is the same number on a GPU, so that either side of the bridge may compute it there."""

from __future__ import annotations

import pytest
import torch

from megatron.rl.rollout.transfer import digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_devices_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_GPU_CHUNK", 100_000)  # several chunks
    matrix = torch.randn(1000, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = digests.tensor_digest(matrix, 7, 11)
    assert digests.tensor_digest(matrix.cuda(), 7, 11) == expected
    strided = torch.zeros(1000, 600, dtype=dtype, device="cuda")
    view = strided[:, ::2].copy_(matrix)
    assert digests.tensor_digest(view, 7, 11) == expected
