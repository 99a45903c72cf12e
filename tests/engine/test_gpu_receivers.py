# SPDX-License-Identifier: Apache-2.0
"""Receivers of the GPU transports, fed on CPU: what they make of a bucket, in vLLM's own words.

The bytes come from the buffers that a trainer fills; CUDA and NCCL would only move them.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.rl.rollout.checkpoint_index import TensorInfo
from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.rollout.transfer.device_buckets import DeviceBuckets, FilledBucket
from tests.engine.conftest import TinyCheckpoint, cpu_config
from tests.engine.fake_engine import GoodFakeEngine

CPU = torch.device("cpu")
MANIFEST = {
    "model.layers.0.a.weight": TensorInfo("BF16", (6, 4)),
    "model.layers.0.b.weight": TensorInfo("F8_E4M3", (8, 16)),
    "model.layers.0.b.weight_scale_inv": TensorInfo("F32", (1, 1)),
    "model.norm.weight": TensorInfo("BF16", (4,)),
}
NAMES = list(MANIFEST)


def values(name: str) -> torch.Tensor:
    info = MANIFEST[name]
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(info.shape, generator=generator).to(info.torch_dtype)


def fill(alignment: int) -> tuple[DeviceBuckets, FilledBucket]:
    buckets = DeviceBuckets(MANIFEST, 1 << 20, CPU, alignment)
    for name in NAMES:
        buckets.slot(name).copy_(values(name))
    return buckets, buckets.cut(NAMES)


def assert_received(loaded: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in loaded] == NAMES
    for name, tensor in loaded:
        assert tensor.dtype == MANIFEST[name].torch_dtype
        assert torch.equal(tensor.view(torch.uint8), values(name).view(torch.uint8)), name


def nccl_update_info() -> dict[str, Any]:
    """What NcclTransport.describe says of this bucket; making one takes a GPU."""
    infos = [MANIFEST[name] for name in NAMES]
    return {
        "names": NAMES,
        "dtype_names": [str(info.torch_dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


class Group:
    """Stands for the NCCL group: what rank 0 broadcasts is in the trainer's buffer."""

    def __init__(self, sent: torch.Tensor) -> None:
        self.sent = [sent]

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        part = self.sent.pop()
        assert tensor.shape == part.shape, "both ends must agree on the bytes of a broadcast"
        tensor.copy_(part)


def test_nccl_bucket() -> None:
    from megatron.rl.rollout.worker.gpu_receivers import NcclReceiver

    loaded: list[tuple[str, torch.Tensor]] = []
    receiver = object.__new__(NcclReceiver)
    receiver.device = CPU
    receiver.load = loaded.extend  # type: ignore[method-assign]
    buckets, filled = fill(alignment=1)
    sent = buckets.buffers[filled.buffer]
    receiver._group = Group(sent[: filled.num_bytes])
    receiver.receive_weights(receiver.parse_update_info(nccl_update_info()))
    sent.zero_()  # the trainer fills it again while vLLM waits for the rest of a layer
    assert_received(loaded)


def test_vllms_own_nccl_receiver_reads_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may have nothing of ours. Only CUDA's streams are left out."""
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from megatron.rl.rollout.transfer.nccl_library import NcclLibrary, loaded_library_path
    from megatron.rl.rollout.transfer.nccl_transport import NcclTransport

    if torch.version.cuda is None:
        pytest.skip("this torch has no NCCL")
    # The handshake is vLLM's as well: it checks every field. The id itself takes a network device.
    monkeypatch.setattr(NcclLibrary, "unique_id", lambda self: bytes(range(128)))
    transport = NcclTransport(1 << 20, 2)
    info = NCCLWeightTransferInitInfo(**transport.init_info())
    assert info.nccl_unique_id_bytes == bytes(range(128))
    assert (info.rank_offset, info.world_size, info.packed) == (1, 3, True)
    assert transport.init_info() == transport.init_info()
    assert transport.engine_environment() == {"VLLM_NCCL_SO_PATH": loaded_library_path()}

    class Stream:
        def synchronize(self) -> None: ...

    streams = (Stream(), Stream())
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    buckets, filled = fill(alignment=1)
    update = nccl_update_info()
    triples = zip(update["names"], update["shapes"], update["dtype_names"], strict=True)
    loaded: list[tuple[str, torch.Tensor]] = []
    packed_tensor.packed_nccl_broadcast_consumer(
        iterator=iter([(n, (shape, getattr(torch, dtype))) for n, shape, dtype in triples]),
        group=Group(buckets.buffers[filled.buffer][: filled.num_bytes]),
        src=0,
        post_unpack_func=loaded.extend,
        buffer_size_bytes=info.packed_buffer_size_bytes,
        num_buffers=info.packed_num_buffers,
        device="cpu",
    )
    assert_received(loaded)


def test_cuda_ipc_bucket() -> None:
    from megatron.rl.rollout.worker.gpu_receivers import CudaIpcReceiver

    loaded: list[tuple[str, torch.Tensor]] = []
    receiver = object.__new__(CudaIpcReceiver)
    receiver.device = CPU
    receiver.load = loaded.extend  # type: ignore[method-assign]
    buckets, filled = fill(alignment=256)
    receiver._buffers = buckets.buffers
    update = {
        "names": NAMES,
        "dtypes": [MANIFEST[name].dtype for name in NAMES],
        "shapes": [list(MANIFEST[name].shape) for name in NAMES],
        "offsets": list(filled.offsets),
        "buffer": filled.buffer,
    }
    receiver.receive_weights(receiver.parse_update_info(update))
    buckets.buffers[filled.buffer].zero_()
    assert_received(loaded)
    beyond = update | {"offsets": [buckets.capacity - 1] * len(NAMES)}
    with pytest.raises(ValueError, match="outside"):
        receiver.receive_weights(receiver.parse_update_info(beyond))
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
        receiver.receive_weights(receiver.parse_update_info(update | {"buffer": 2}))


def test_the_receivers_are_registered() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from megatron.rl.rollout.transfer.weight_transport import CUDA_IPC_BACKEND, NCCL_BACKEND
    from megatron.rl.rollout.worker.vllm_plugin import register

    register()
    register()  # vLLM calls plugins more than once
    for backend in (CUDA_IPC_BACKEND, NCCL_BACKEND):
        receiver = WeightTransferEngineFactory._registry[backend]()
        assert not getattr(receiver, "__abstractmethods__", None)


def test_an_engine_with_another_nccl_is_refused_before_they_meet(
    checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake worker does not say which NCCL it has; one of vLLM's own reports it."""
    monkeypatch.setattr(GoodFakeEngine, "counter", str(tmp_path / "starts"))
    config = cpu_config(
        checkpoint.folder,
        device="cuda",
        threads=None,
        transport="nccl",
        log_path=str(tmp_path / "log"),
    )
    with (
        GoodFakeEngine(config) as engine,
        pytest.raises(EngineConfigError, match=r"the engine's unknown.*VLLM_NCCL_SO_PATH"),
    ):
        engine.wait_ready()
