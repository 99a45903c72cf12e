# SPDX-License-Identifier: Apache-2.0
"""CUDA IPC between two processes on one GPU, without an engine: handles as JSON, bytes as sent."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from megatron.rl.rollout.checkpoint_index import TensorInfo
from megatron.rl.rollout.transfer.cuda_ipc_transport import CudaIpcHandle, CudaIpcTransport

MANIFEST = {f"layer.{i}.weight": TensorInfo("BF16", (256, 32 + i)) for i in range(6)}
ANSWER_TIMEOUT_S = 120.0


def values(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * version + len(name) + int(name.split(".")[1]))
    return torch.randn(MANIFEST[name].shape, generator=generator).to(torch.bfloat16)


def read_buckets(pipe: Connection) -> None:
    """The other process: maps the buffers once, answers each bucket with the sum of its bytes."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    torch.cuda.init()
    info = json.loads(pipe.recv())
    handles = [CudaIpcHandle.from_fields(fields) for fields in info["exports"][0]]
    own = str(torch.cuda.get_device_properties(0).uuid)
    assert all(handle.device_uuid == own for handle in handles)
    buffers = [rebuild_cuda_tensor(*handle.rebuild_arguments(0)) for handle in handles]
    pipe.send("mapped")
    while (text := pipe.recv()) != "end":
        bucket = json.loads(text)
        sums: dict[str, Any] = {}
        for name, shape, offset in zip(
            bucket["names"], bucket["shapes"], bucket["offsets"], strict=True
        ):
            size = torch.Size(shape).numel() * 2
            part = buffers[bucket["buffer"]][offset : offset + size].clone()
            sums[name] = part.view(torch.bfloat16).view(shape).double().sum().item()
        torch.cuda.synchronize()
        pipe.send(json.dumps(sums))
    del buffers
    torch.cuda.synchronize()
    pipe.send("left")


def test_buckets_arrive_as_they_were_packed() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_buckets, args=(theirs,), daemon=True)
    process.start()

    def answer() -> Any:
        assert ours.poll(ANSWER_TIMEOUT_S), "the other process does not answer"
        return ours.recv()

    transport = CudaIpcTransport(bucket_bytes=40_000, num_receivers=1)
    names = list(MANIFEST)
    for version in range(3):
        transport.open(MANIFEST)
        if version == 0:
            ours.send(json.dumps(transport.init_info()))
            assert answer() == "mapped"
        for first in range(0, len(names), 2):
            bucket = names[first : first + 2]
            for name in bucket:
                transport.slot(name).copy_(values(name, version))
            ours.send(json.dumps(transport.describe(bucket)))
            for name, total in json.loads(answer()).items():
                assert total == values(name, version).double().sum().item(), (name, version)
            transport.loaded(bucket)
    ours.send("end")
    assert answer() == "left"
    process.join(30)
    transport.close()
