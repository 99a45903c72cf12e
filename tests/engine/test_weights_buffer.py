# SPDX-License-Identifier: Apache-2.0
"""Updates are exactly the checkpoint's tensors, and the memory that carries them is freed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from megatron.rl.rollout.checkpoint_index import CheckpointIndex, TensorInfo, read_checkpoint_index
from megatron.rl.rollout.errors import EngineConfigError, EngineError, WeightNamesError
from megatron.rl.rollout.transfer import weights_buffer
from megatron.rl.rollout.transfer.weight_format import WeightFormat
from megatron.rl.rollout.transfer.weight_packer import WeightPacker
from megatron.rl.rollout.transfer.weight_transport import SharedMemoryTransport
from megatron.rl.rollout.transfer.weights_buffer import WeightsBuffer
from megatron.rl.weights.block_fp8 import BlockFP8, dequantize_weight, quantize_weight

INDEX = CheckpointIndex(
    {
        "embed.weight": TensorInfo("BF16", (4, 2)),
        "a.q_proj.weight": TensorInfo("BF16", (130, 260)),
        "a.norm.weight": TensorInfo("F32", (3,)),
        "scalar": TensorInfo("F32", ()),
    },
    optional=frozenset(),
    vocab_size=4,
)


def good_update() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.q_proj.weight": torch.randn(130, 260, generator=generator),
        "embed.weight": torch.arange(8).reshape(2, 4).t().bfloat16(),  # not contiguous
        "scalar": torch.tensor(3.5),
        "a.norm.weight": torch.tensor([0.25, -0.0, 1 / 3], requires_grad=True),
    }


@pytest.fixture
def transport() -> Iterator[SharedMemoryTransport]:
    made = SharedMemoryTransport()
    yield made
    made.close()


def make_packer(
    transport: SharedMemoryTransport,
    weight_format: WeightFormat = WeightFormat("bfloat16"),  # noqa: B008 - frozen
    bucket_bytes: int = 1 << 20,
    index: CheckpointIndex = INDEX,
) -> WeightPacker:
    return WeightPacker(transport, index, weight_format, bucket_bytes, with_digests=True)


READ_ELSEWHERE = """
import json, mmap, os, sys, torch
from megatron.rl.rollout.checkpoint_index import TensorInfo
from megatron.rl.rollout.transfer.weights_buffer import map_tensor
info, bucket = json.load(sys.stdin)
file = os.open(info["path"], os.O_RDONLY)
mapped = mmap.mmap(file, info["num_bytes"], prot=mmap.PROT_READ)
places = zip(bucket["names"], bucket["dtypes"], bucket["shapes"], bucket["offsets"])
print(json.dumps({n: map_tensor(mapped, TensorInfo(d, tuple(s)), o).float().tolist()
                  for n, d, s, o in places}))
"""


def test_another_process_reads_what_was_packed(transport: SharedMemoryTransport) -> None:
    update = good_update()
    (bucket,) = make_packer(transport).pack(update.items())
    message = json.dumps([transport.init_info(), transport.describe(bucket)])
    read = json.loads(
        subprocess.check_output([sys.executable, "-c", READ_ELSEWHERE], input=message, text=True)
    )
    assert list(read) == list(update)
    for name, tensor in update.items():
        # The engine's type: rounded to nearest, ties to even, as torch does it.
        assert torch.equal(torch.tensor(read[name]), tensor.detach().bfloat16().float()), name


def test_memory_is_kept_for_the_next_update_and_has_no_name(
    transport: SharedMemoryTransport,
) -> None:
    packer = make_packer(transport)
    list(packer.pack(good_update().items()))
    info = transport.init_info()
    slot = transport.slot("embed.weight")
    list(packer.pack([(name, tensor * 2) for name, tensor in good_update().items()]))
    assert transport.init_info() == info
    assert torch.equal(slot, good_update()["embed.weight"] * 2), "the same memory"
    assert not [name for name in os.listdir("/dev/shm") if "rollout-weights" in name]
    transport.close()
    assert not os.path.exists(info["path"])
    assert not slot.any(), "the memory was given back, though a tensor still looks at it"


def test_a_tensor_in_its_slot_is_not_copied(transport: SharedMemoryTransport) -> None:
    packer = make_packer(transport)
    update = {name: tensor.detach() for name, tensor in good_update().items()}
    for name, tensor in list(update.items()):
        place = packer.slot(name, tensor.shape)
        assert place is not None and place.dtype == torch.bfloat16
        update[name] = place.copy_(tensor)
    (bucket,) = packer.pack(update.items())
    assert set(bucket) == set(update)
    assert packer.slot("embed.weight", (2, 4)) is None
    fp8 = make_packer(SharedMemoryTransport(), WeightFormat("bfloat16", "block_fp8"))
    assert fp8.slot("a.q_proj.weight", (130, 260)) is None


def test_buckets_are_full_before_they_are_announced(transport: SharedMemoryTransport) -> None:
    seen: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in good_update().items():
            seen.append(name)
            yield name, tensor

    packer = make_packer(transport, bucket_bytes=16)
    buckets = []
    for bucket in packer.pack(watched()):
        assert seen[-1] == bucket[-1], "packed further than the bucket"
        buckets.append(bucket)
    assert buckets == [("a.q_proj.weight",), ("embed.weight",), ("scalar", "a.norm.weight")]
    packed = packer.packed(4)
    assert packed.num_bytes == 2 * (130 * 260 + 8 + 1 + 3) and packed.version == 4
    assert set(packed.digests) == set(packed.names) == set(INDEX.tensors)


@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
def test_block_fp8_travels_with_its_scales(transport: SharedMemoryTransport, scales: str) -> None:
    weight_format = WeightFormat("bfloat16", "block_fp8", scales)
    packer = make_packer(transport, weight_format)
    update = good_update()
    (bucket,) = packer.pack(update.items())
    name = "a.q_proj.weight"
    assert bucket[:2] == (name, f"{name}_scale_inv")
    expected = quantize_weight(update[name], BlockFP8(scales))
    data, scale = transport.slot(name), transport.slot(f"{name}_scale_inv")
    assert data.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scale, expected.scale_inv)
    # What the engine must hold: at the door it has its own type again.
    from megatron.rl.rollout.transfer.digests import tensor_digest

    values = dequantize_weight(expected.data, expected.scale_inv, torch.bfloat16)
    assert packer.packed(0).digests[name] == tensor_digest(values)
    assert f"{name}_scale_inv" not in packer.packed(0).digests


def test_an_fp8_checkpoint_is_not_quantised_again() -> None:
    index = CheckpointIndex({"a.q_proj.weight": TensorInfo("F8_E4M3", (2, 2))}, frozenset(), 4)
    with pytest.raises(EngineConfigError, match=r"a\.q_proj.*already"):
        make_packer(SharedMemoryTransport(), WeightFormat("bfloat16", "block_fp8"), index=index)


def pairs_with(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [*good_update().items(), (name, tensor)]


def test_duplicate_unknown_missing_and_misshapen_tensors_are_refused(
    transport: SharedMemoryTransport,
) -> None:
    packer = make_packer(transport)
    lacking = good_update()
    del lacking["a.norm.weight"]
    for pairs, message in (
        (pairs_with("scalar", torch.tensor(1.0)), "scalar occurs twice"),
        (pairs_with("lm_head.weight", torch.zeros(4, 2)), "not in the engine's checkpoint: lm_h"),
        (list(lacking.items()), r"1 of the checkpoint's 4 .* a\.norm\.weight"),
        ([("embed.weight", torch.zeros(2, 4))], r"shape \[2, 4\], the checkpoint has \[4, 2\]"),
        ([("embed.weight", torch.zeros(4, 2).to(torch.float8_e4m3fn))], "float8"),
        ([], "missing"),
    ):
        with pytest.raises(WeightNamesError, match=message):
            list(packer.pack(pairs))
    shapes = {name: tensor.shape for name, tensor in good_update().items()}
    packer.check_shapes(shapes)
    for wrong in (
        {**shapes, "x": (1,)},
        {**shapes, "scalar": (1,)},
        dict(list(shapes.items())[1:]),
    ):
        with pytest.raises(WeightNamesError):
            packer.check_shapes(wrong)


def test_an_iterator_is_read_no_further_than_the_first_offence(
    transport: SharedMemoryTransport,
) -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", torch.zeros(4, 2)
        yield "misspelt", torch.zeros(4, 2)
        raise AssertionError("read on after an unknown name")

    with pytest.raises(WeightNamesError, match="misspelt"):
        list(make_packer(transport).pack(gathered()))


def test_the_disk_is_taken_when_memory_has_no_room(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(weights_buffer, "_available_memory_bytes", lambda: 0)
    monkeypatch.setattr(weights_buffer.tempfile, "gettempdir", lambda: str(tmp_path))
    manifest = {"w": TensorInfo("F32", (300, 5)), "empty": TensorInfo("F32", (0, 5))}
    buffer = WeightsBuffer(manifest)
    assert buffer.folder == str(tmp_path) and os.listdir(tmp_path) == []
    buffer.tensor("w").fill_(2.0)
    assert buffer.tensor("w").sum() == 3000 and buffer.tensor("empty").numel() == 0
    buffer.close()
    buffer.close()
    with pytest.raises(EngineError, match="no room for the weights"):
        WeightsBuffer({"w": TensorInfo("F32", (1 << 50,))})


def test_index_of_a_checkpoint(checkpoint) -> None:
    index = read_checkpoint_index(checkpoint.folder)
    assert {n: i.shape for n, i in index.tensors.items()} == {
        n: tuple(t.shape) for n, t in checkpoint.tensors.items()
    }
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in index.tensors
    assert index.optional == frozenset()


def test_folders_that_cannot_be_served_are_refused(tmp_path) -> None:
    with pytest.raises(EngineConfigError, match=r"config\.json"):
        read_checkpoint_index(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4}))
    with pytest.raises(EngineConfigError, match=r"no weights.*found config\.json"):
        read_checkpoint_index(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    with pytest.raises(EngineConfigError, match="incomplete"):
        read_checkpoint_index(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(EngineConfigError, match="no safetensors file"):
        read_checkpoint_index(tmp_path)


def test_an_old_bin_checkpoint_and_a_tied_head(tmp_path, transport) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 4, "tie_word_embeddings": True})
    )
    torch.save(
        {"embed.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)},
        tmp_path / "pytorch_model.bin",
    )
    index = read_checkpoint_index(tmp_path)
    assert index.tensors["embed.weight"] == TensorInfo("F32", (4, 2))
    packer = make_packer(transport, index=index)
    assert list(packer.pack([("embed.weight", torch.zeros(4, 2))])) == [("embed.weight",)]
