# SPDX-License-Identifier: Apache-2.0
"""Two alternating buffers: contents, order, room, and no overwriting of what is still read."""

from collections.abc import Mapping

import pytest
import torch

from megatron.rl.rollout.checkpoint_index import TensorInfo
from megatron.rl.rollout.errors import EngineError
from megatron.rl.rollout.transfer.device_buckets import DeviceBuckets

CPU = torch.device("cpu")
MANIFEST: Mapping[str, TensorInfo] = {
    "a": TensorInfo("BF16", (3, 5)),
    "b": TensorInfo("F8_E4M3", (4, 8)),
    "b_scale_inv": TensorInfo("F32", (1, 1)),
    "c": TensorInfo("F32", (7,)),
    "empty": TensorInfo("F32", (0, 4)),
}


def values(name: str) -> torch.Tensor:
    info = MANIFEST[name]
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(info.shape, generator=generator).to(info.torch_dtype)


def test_slots_hold_what_is_written_and_alternate() -> None:
    buckets = DeviceBuckets(MANIFEST, 16, CPU, alignment=256)
    used = []
    for bucket in (["a"], ["b", "b_scale_inv"], ["c", "empty"]):
        for name in bucket:
            slot = buckets.slot(name)
            assert slot.shape == MANIFEST[name].shape
            slot.copy_(values(name))
            assert buckets.slot(name).data_ptr() == slot.data_ptr()
        filled = buckets.cut(bucket)
        used.append(filled.buffer)
        assert all(offset % 256 == 0 for offset in filled.offsets)
        for name, offset in zip(bucket, filled.offsets, strict=True):
            info = MANIFEST[name]
            part = buckets.buffers[filled.buffer][offset : offset + info.num_bytes]
            read = part.clone().view(info.torch_dtype).view(info.shape)
            assert torch.equal(read.view(torch.uint8), values(name).view(torch.uint8)), name
        buckets.release(bucket)
    assert used == [0, 1, 0]


def test_a_buffer_that_is_read_is_not_filled() -> None:
    buckets = DeviceBuckets(MANIFEST, 16, CPU, alignment=256)
    buckets.slot("a").copy_(values("a"))
    buckets.cut(["a"])
    buckets.slot("b").copy_(values("b"))  # the other one is free
    buckets.slot("b_scale_inv").copy_(values("b_scale_inv"))
    buckets.cut(["b", "b_scale_inv"])
    with pytest.raises(EngineError, match="has not read"):
        buckets.slot("c")
    buckets.release(["a"])
    buckets.slot("c")


def test_an_update_that_stopped_is_forgotten() -> None:
    buckets = DeviceBuckets(MANIFEST, 16, CPU, alignment=256)
    for bucket in (["a"], ["c"]):
        buckets.slot(bucket[0])
        buckets.cut(bucket)
    buckets.begin()
    buckets.slot("b")
    with pytest.raises(EngineError, match="another order"):
        buckets.cut(["b", "b_scale_inv"])


def test_without_gaps_a_misaligned_tensor_is_refused() -> None:
    """The packed form of vLLM has no gaps, and it reads in place."""
    buckets = DeviceBuckets(MANIFEST, 1 << 20, CPU, alignment=1)
    buckets.slot("a")  # 30 bytes
    with pytest.raises(EngineError, match=r"c \(F32\) would start at byte 30"):
        buckets.slot("c")


@pytest.mark.parametrize("bucket_bytes", [1, 33, 1 << 20])
def test_a_full_bucket_fits(bucket_bytes: int) -> None:
    """Filled as the packer does: cut once it holds bucket_bytes, scales with their weight."""
    manifest = {}
    for layer in range(9):
        manifest[f"{layer}.weight"] = TensorInfo("F8_E4M3", (4, 8 + layer))
        manifest[f"{layer}.weight_scale_inv"] = TensorInfo("F32", (2, 1))
    buckets = DeviceBuckets(manifest, bucket_bytes, CPU, alignment=256)
    bucket: list[str] = []
    size = 0
    for layer in range(9):
        for name in (f"{layer}.weight", f"{layer}.weight_scale_inv"):
            buckets.slot(name)
            bucket.append(name)
            size += manifest[name].num_bytes
        if size >= bucket_bytes:
            buckets.cut(bucket)
            buckets.release(bucket)
            bucket, size = [], 0
