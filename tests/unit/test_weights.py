# SPDX-License-Identifier: Apache-2.0
"""The name table, the joins and checkpoint files, without process groups."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import parse_architecture
from megatron.rl.weights.hf_files import HFTensors, write_checkpoint
from megatron.rl.weights.joins import Rectangle, Shard, cut
from megatron.rl.weights.names import (
    Rule,
    embedding_rule,
    final_norm_rule,
    hf_shapes,
    layer_rules,
)
from tests import checkpoints

TIED = checkpoints.QWEN3 | {"tie_word_embeddings": True}
PADDED_VOCAB = 512


@pytest.mark.parametrize(
    "config", [checkpoints.QWEN3, checkpoints.QWEN3_MOE, checkpoints.LLAMA, TIED]
)
def test_names_and_shapes_are_those_of_transformers(config: dict) -> None:  # type: ignore[type-arg]
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    with torch.device("meta"):
        hf_config = AutoConfig.for_model(config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(hf_config)
    ours = hf_shapes(parse_architecture(config))
    assert ours == checkpoints.tensor_shapes(config)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config["model_type"] == "qwen3_moe":  # transformers fuses experts in memory only
        ours, theirs = (
            {name: shape for name, shape in shapes.items() if ".experts." not in name}
            for shapes in (ours, theirs)
        )
    assert ours == theirs


def _rule(config: dict, parameter: str) -> Rule:  # type: ignore[type-arg]
    model = parse_architecture(config)
    rules = [embedding_rule(model), final_norm_rule(model), *layer_rules(model)]
    (rule,) = (rule for rule in rules if rule.local.endswith(parameter))
    return rule


def _shards(config: dict, parameter: str, ways: int) -> tuple[Shard, ...]:  # type: ignore[type-arg]
    return cut(_rule(config, parameter), parse_architecture(config), ways, PADDED_VOCAB)


def _fill(shards: tuple[Shard, ...], tensors: dict[str, Tensor]) -> list[Tensor]:
    """The shards' values, NaN where nothing is written."""
    values = []
    for shard in shards:
        value = torch.full(shard.shape, torch.nan)
        for part in shard.parts:
            value[part.source.index(value.dim())] = tensors[part.name][
                part.target.index(value.dim())
            ]
        values.append(value)
    return values


def _marked(rows: dict[str, int], columns: int = 1) -> dict[str, Tensor]:
    """Row r of tensor number n is n + r / 1000."""
    return {
        name: (n + torch.arange(count) / 1000)[:, None].expand(-1, columns)
        for n, (name, count) in enumerate(rows.items())
    }


ONE_COLUMN = checkpoints.QWEN3 | {"hidden_size": 1, "head_dim": 2}  # 4 heads, 2 groups
QKV = [f"model.layers.{{layer}}.self_attn.{x}_proj.weight" for x in "qkv"]


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_qkv_rows_are_grouped_by_key_value_head(ways: int) -> None:
    """Per group its two query heads, its key head, its value head; then equal cuts."""
    tensors = _marked({QKV[0]: 8, QKV[1]: 4, QKV[2]: 4})
    shards = _fill(_shards(ONE_COLUMN, "linear_qkv.weight", ways), tensors)
    q, k, v = (tensors[name] for name in QKV)
    expected = torch.cat([q[0:4], k[0:2], v[0:2], q[4:8], k[2:4], v[2:4]])
    assert torch.equal(torch.cat(shards), expected)
    assert len({shard.shape for shard in shards}) == 1 and len(shards) == ways


def test_each_shard_has_gate_above_up() -> None:
    config = ONE_COLUMN | {"intermediate_size": 6}
    names = [f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up")]
    tensors = _marked(dict.fromkeys(names, 6))
    gate, up = tensors.values()
    first, second = _fill(_shards(config, "mlp.linear_fc1.weight", 2), tensors)
    assert torch.equal(first, torch.cat([gate[:3], up[:3]]))
    assert torch.equal(second, torch.cat([gate[3:], up[3:]]))


def test_columns_are_cut_side_by_side() -> None:
    weight = torch.arange(2 * 8.0).view(2, 8)
    config = checkpoints.QWEN3 | {"hidden_size": 2, "head_dim": 2}
    name = "model.layers.{layer}.self_attn.o_proj.weight"
    shards = _fill(_shards(config, "linear_proj.weight", 2), {name: weight})
    assert [shard.tolist() for shard in shards] == [
        [[0, 1, 2, 3], [8, 9, 10, 11]],
        [[4, 5, 6, 7], [12, 13, 14, 15]],
    ]


def test_vocabulary_padding_belongs_to_the_last_shards() -> None:
    shards = _shards(checkpoints.QWEN3, "word_embeddings.weight", 4)
    # 301 rows padded to 512: 128, 128, 45 and none.
    assert [shard.padding for shard in shards] == [0, 0, 128 - 45, 128]
    assert [part.target for shard in shards for part in shard.parts] == [
        Rectangle(0, 128, 0, 64), Rectangle(128, 256, 0, 64), Rectangle(256, 301, 0, 64)
    ]  # fmt: skip


def test_a_norm_is_whole_everywhere() -> None:
    (shard,) = _shards(checkpoints.QWEN3, "final_layernorm.weight", 4)
    assert shard.shape == (64,)
    assert shard.parts[0].source == shard.parts[0].target == Rectangle(0, 1, 0, 64)


def test_checkpoint_is_written_in_shards_that_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints.write_checkpoint(tmp_path / "source", checkpoints.QWEN3_MOE)
    (source / "tokenizer.json").write_text("{}")
    tensors = checkpoints.random_tensors(checkpoints.QWEN3_MOE, seed=5)
    monkeypatch.setattr("megatron.rl.weights.hf_files.MAX_SHARD_BYTES", 100_000)
    target = tmp_path / "target"
    write_checkpoint(target, tensors.items(), copy_from=source)
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1
    assert (target / "tokenizer.json").exists() and (target / "config.json").exists()
    with HFTensors(target) as read:
        assert read.shapes() == checkpoints.tensor_shapes(checkpoints.QWEN3_MOE)
        assert all(torch.equal(read.read(name), tensor) for name, tensor in tensors.items())
        name = "model.layers.1.mlp.gate.weight"
        part = read.read_part(name, Rectangle(1, 3, 8, 40))
        assert torch.equal(part, tensors[name][1:3, 8:40])
        norm = read.read_part("model.norm.weight", Rectangle(0, 1, 8, 40))
        assert torch.equal(norm, tensors["model.norm.weight"][8:40])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(tmp_path / "twice", checkpoints.QWEN3)
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "old.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight is in two of .*twice"):
        HFTensors(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected weights in"):
        HFTensors(tmp_path)
