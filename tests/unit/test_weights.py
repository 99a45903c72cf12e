# SPDX-License-Identifier: Apache-2.0
"""The name table and the joins, without process groups."""

from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import parse_architecture
from megatron.rl.weights.hf_files import HFTensors, write_checkpoint
from megatron.rl.weights.names import (
    Join,
    expected_hf_names,
    hf_to_shard,
    locate,
    shards_to_hf,
)
from tests import checkpoints

MOE = parse_architecture(checkpoints.QWEN3_MOE)
DENSE = parse_architecture(checkpoints.QWEN3)
TIED = checkpoints.QWEN3 | {"tie_word_embeddings": True}


@pytest.mark.parametrize("config", [checkpoints.QWEN3, checkpoints.QWEN3_MOE, TIED])
def test_expected_names_are_those_of_transformers(config: dict) -> None:  # type: ignore[type-arg]
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    with torch.device("meta"):
        hf_config = AutoConfig.for_model(config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(hf_config)
    expected = set(expected_hf_names(parse_architecture(config)))
    assert expected == set(checkpoints.tensor_shapes(config))
    theirs = {name for name, _ in model.named_parameters()}
    if config["model_type"] == "qwen3_moe":  # transformers fuses experts in memory only
        theirs = {name for name in theirs if ".experts." not in name}
        expected = {name for name in expected if ".experts." not in name}
    assert expected == theirs


@pytest.mark.parametrize(
    ("parameter", "hf_names"),
    [
        ("embedding.word_embeddings.weight", ["model.embed_tokens.weight"]),
        ("output_layer.weight", ["lm_head.weight"]),
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            [f"model.layers.11.self_attn.{x}_proj.weight" for x in "qkv"],
        ),
        # Transformer Engine's names for what local modules call otherwise.
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            ["model.layers.10.input_layernorm.weight"],
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            ["model.layers.10.post_attention_layernorm.weight"],
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc1.weight3",
            [f"model.layers.10.mlp.experts.67.{x}_proj.weight" for x in ("gate", "up")],
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
            ["model.layers.10.mlp.experts.67.down_proj.weight"],
        ),
        ("decoder.layers.0.mlp.router.weight", ["model.layers.10.mlp.gate.weight"]),
    ],
)
def test_names_are_global(parameter: str, hf_names: list[str]) -> None:
    location = locate(parameter, layer_offset=10, expert_offset=64)
    assert list(location.hf_names) == hf_names


def test_a_tied_head_is_the_embedding() -> None:
    assert locate("output_layer.weight", tied=True).hf_names == ("model.embed_tokens.weight",)


def test_unknown_parameter_is_an_error() -> None:
    with pytest.raises(KeyError, match="no rule"):
        locate("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "parameter",
    [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
    ],
)
def test_shards_join_to_what_they_were_cut_from(parameter: str, world_size: int) -> None:
    tensors = checkpoints.random_tensors(checkpoints.QWEN3, seed=1)
    location = locate(parameter)
    cut = partial(
        hf_to_shard,
        location.rule,
        [partial(tensors.__getitem__, name) for name in location.hf_names],
        DENSE,
        world_size=world_size,
        padded_rows=512,
    )
    shards = [cut(rank=rank) for rank in range(world_size)]
    joined = shards_to_hf(location.rule, shards, DENSE)
    for name, tensor in zip(location.hf_names, joined, strict=True):
        assert torch.equal(tensor, tensors[name]), name


def test_qkv_rows_are_grouped_by_key_value_head() -> None:
    """Group 1 of 2: its two query heads, then its key head, then its value head."""
    d = DENSE.head_dim
    q, k, v = (torch.arange(n * d, dtype=torch.float32)[:, None] + c for n, c in
               ((4, 1000), (2, 2000), (2, 3000)))  # fmt: skip
    shard = hf_to_shard(
        locate("decoder.layers.0.self_attention.linear_qkv.weight").rule,
        [lambda: q, lambda: k, lambda: v],
        DENSE,
        rank=1,
        world_size=2,
        padded_rows=0,
    )
    assert torch.equal(shard, torch.cat([q[2 * d :], k[d:], v[d:]]))


def test_vocabulary_padding_is_zero_and_dropped_again() -> None:
    rule = locate("output_layer.weight").rule
    assert rule.join is Join.VOCAB
    head = torch.ones(301, 4)
    shards = [
        hf_to_shard(rule, [lambda: head], DENSE, rank=r, world_size=2, padded_rows=512)
        for r in range(2)
    ]
    assert shards[1].shape == (256, 4)
    assert shards[1][301 - 256 :].abs().sum() == 0
    (joined,) = shards_to_hf(rule, shards, DENSE)
    assert torch.equal(joined, head)


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
        assert read.names() == set(tensors)
        assert all(torch.equal(read.read(name), tensor) for name, tensor in tensors.items())


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected weights in"):
        HFTensors(tmp_path)
