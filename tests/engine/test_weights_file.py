# SPDX-License-Identifier: Apache-2.0
"""Updates are exactly the checkpoint's tensors, and the file that carries them leaves no trace."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from megatron.rl.rollout import weights_file
from megatron.rl.rollout.checkpoint_index import CheckpointIndex, TensorInfo, read_checkpoint_index
from megatron.rl.rollout.errors import EngineConfigError, EngineError, WeightNamesError
from megatron.rl.rollout.weights_file import write_weights

INDEX = CheckpointIndex(
    {
        "embed.weight": TensorInfo("BF16", (4, 2)),
        "proj.weight": TensorInfo("F8_E4M3", (2, 2)),
        "proj.weight_scale_inv": TensorInfo("F32", (1, 1)),
        "scalar": TensorInfo("F32", ()),
    },
    optional=frozenset(),
    vocab_size=4,
)


def good_update() -> dict[str, torch.Tensor]:
    return {
        "proj.weight": torch.tensor([[1.0, 2.0], [3.0, 448.0]]).to(torch.float8_e4m3fn),
        "embed.weight": torch.arange(8).reshape(2, 4).t().bfloat16(),  # not contiguous
        "scalar": torch.tensor(3.5),
        "proj.weight_scale_inv": torch.tensor([[0.25]], requires_grad=True),
    }


def test_the_file_is_readable_through_its_path_by_another_process():
    update = good_update()
    file = write_weights(update, INDEX)
    with safe_open(file.path, framework="pt") as read:
        assert set(read.keys()) == set(update)
        for name, tensor in update.items():
            got = read.get_tensor(name)
            assert got.dtype == tensor.dtype
            assert torch.equal(got.float(), tensor.float())
    code = f"import os; print(os.stat({file.path!r}).st_size)"
    size = int(subprocess.check_output([sys.executable, "-c", code]))
    assert size > file.num_bytes == 16 + 4 + 4 + 4
    file.close()
    assert not os.path.exists(file.path)
    file.close()


def test_the_file_has_no_name_that_could_be_left_behind():
    before = set(os.listdir(weights_file.SHARED_MEMORY_FOLDER))
    file = write_weights(good_update(), INDEX)
    assert set(os.listdir(file.folder)) <= before or file.folder != "/dev/shm"
    assert not [n for n in os.listdir(file.folder) if n.startswith("rollout-weights-")]
    file.close()


def pairs_with(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [*good_update().items(), (name, tensor)]


def test_duplicate_unknown_missing_and_misshapen_tensors_are_refused():
    with pytest.raises(WeightNamesError, match="scalar occurs twice"):
        write_weights(pairs_with("scalar", torch.tensor(1.0)), INDEX)
    with pytest.raises(WeightNamesError, match="not in the engine's checkpoint: lm_head"):
        write_weights(pairs_with("lm_head.weight", torch.zeros(4, 2)), INDEX)
    update = good_update()
    del update["proj.weight_scale_inv"]
    with pytest.raises(WeightNamesError, match=r"1 of the checkpoint's 4 .* proj.weight_scale_inv"):
        write_weights(update, INDEX)
    with pytest.raises(WeightNamesError, match=r"shape \[2, 4\], the checkpoint has \[4, 2\]"):
        write_weights({**good_update(), "embed.weight": torch.zeros(2, 4)}, INDEX)
    with pytest.raises(WeightNamesError, match="float8"):
        write_weights({**good_update(), "proj.weight": torch.zeros(2, 2)}, INDEX)
    with pytest.raises(WeightNamesError, match="missing"):
        write_weights({}, INDEX)


def test_an_iterator_is_read_no_further_than_the_first_offence():
    def gathered():
        yield "embed.weight", torch.zeros(4, 2)
        yield "misspelt", torch.zeros(4, 2)
        raise AssertionError("read on after an unknown name")

    with pytest.raises(WeightNamesError, match="misspelt"):
        write_weights(gathered(), INDEX)


def test_an_error_of_the_iterator_comes_through():
    def gathered():
        yield "embed.weight", torch.zeros(4, 2)
        raise KeyError("rank 3 is gone")

    with pytest.raises(KeyError):
        write_weights(gathered(), INDEX)


def test_the_disk_is_taken_when_memory_has_no_room(monkeypatch, tmp_path):
    monkeypatch.setattr(weights_file, "_available_memory_bytes", lambda: 0)
    monkeypatch.setattr(weights_file.tempfile, "gettempdir", lambda: str(tmp_path))
    file = write_weights(good_update(), INDEX)
    assert file.folder == str(tmp_path)
    file.close()
    huge = CheckpointIndex({"w": TensorInfo("F32", (1 << 50,))}, frozenset(), 4)
    with pytest.raises(EngineError, match="no room for the weights"):
        write_weights({}, huge)


def test_index_of_a_checkpoint(checkpoint):
    index = read_checkpoint_index(checkpoint.folder)
    assert {n: i.shape for n, i in index.tensors.items()} == {
        n: tuple(t.shape) for n, t in checkpoint.tensors.items()
    }
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in index.tensors
    assert index.optional == frozenset()


def test_folders_that_cannot_be_served_are_refused(tmp_path):
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


def test_an_old_bin_checkpoint_and_a_tied_head(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 4, "tie_word_embeddings": True})
    )
    torch.save(
        {"embed.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)},
        tmp_path / "pytorch_model.bin",
    )
    index = read_checkpoint_index(tmp_path)
    assert index.tensors["embed.weight"] == TensorInfo("F32", (4, 2))
    write_weights({"embed.weight": torch.zeros(4, 2)}, index).close()
