# SPDX-License-Identifier: Apache-2.0
"""The weight plan as data: who holds what, its checks of itself, and who sends what to whom."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import parse_architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.weights.engine_layout import TensorBytes, check_engine_layout, engine_bytes
from megatron.rl.weights.joins import Rectangle
from megatron.rl.weights.names import Naming, hf_shapes
from megatron.rl.weights.plan import HFTensor, Piece, WeightPlan, WeightPlanError, plan_weights
from megatron.rl.weights.routes import Routes
from tests import checkpoints
from tests.checkpoints import QWEN3_30B, QWEN3_235B

MOE4 = checkpoints.QWEN3_MOE | {"num_hidden_layers": 4}
# Twice two stages of two ranks: ranks 0-3 have stage 0, of which 0 and 2 have TP rank 0.
LAYOUT = ParallelConfig(tensor=2, pipeline=2, data=2, expert=2)


def _plan(
    config: dict[str, Any] = MOE4,
    layout: ParallelConfig = LAYOUT,
    naming: Naming = "local",
) -> WeightPlan:
    model = parse_architecture(config)
    layout.check(model)
    return plan_weights(model, layout, naming)


@pytest.mark.parametrize(
    ("config", "layout", "tensors", "parameters"),
    [
        (
            QWEN3_30B,
            ParallelConfig(tensor=4, data=256, expert=8),
            18_867,
            30_532_122_624,
        ),
        (
            QWEN3_235B,
            ParallelConfig(
                tensor=8, pipeline=8, data=16, expert=8, first_stage_layers=11, last_stage_layers=11
            ),
            36_945,
            235_093_634_560,
        ),
    ],
    ids=["30B-A3B", "235B-A22B"],
)
def test_real_models_are_planned_completely(
    config: dict[str, Any], layout: ParallelConfig, tensors: int, parameters: int
) -> None:
    plan = _plan(config, layout, "transformer_engine")
    assert len(plan.by_name) == tensors
    assert sum(tensor.numel for tensor in plan.tensors) == parameters


@pytest.mark.parametrize(
    ("naming", "tensor", "parameter", "chunk", "holders"),
    [
        ("local", "model.embed_tokens.weight", "embedding.word_embeddings.weight", 0, [0, 2]),
        ("local", "lm_head.weight", "output_layer.weight", 0, [4, 6]),
        ("local", "model.norm.weight", "decoder.final_layernorm.weight", 0, [4, 5, 6, 7]),
        # Layer 2 is the second stage's layer 0, expert 3 the second expert rank's expert 1.
        ("local", "model.layers.2.mlp.experts.3.up_proj.weight",
         "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", 0, [5, 7]),
        ("transformer_engine", "model.layers.2.mlp.experts.3.down_proj.weight",
         "decoder.layers.0.mlp.experts.linear_fc2.weight1", 0, [5, 7]),
        ("local", "model.layers.1.self_attn.o_proj.weight",
         "decoder.layers.1.self_attention.linear_proj.weight", 0, [0, 2]),
        ("local", "model.layers.3.input_layernorm.weight",
         "decoder.layers.1.input_layernorm.weight", 0, [4, 5, 6, 7]),
        ("transformer_engine", "model.layers.3.input_layernorm.weight",
         "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", 0, [4, 5, 6, 7]),
        ("transformer_engine", "model.layers.3.post_attention_layernorm.weight",
         "decoder.layers.1.pre_mlp_layernorm.weight", 0, [4, 5, 6, 7]),
        ("local", "model.layers.0.mlp.gate.weight",
         "decoder.layers.0.mlp.router.weight", 0, [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_first_piece(
    naming: Naming, tensor: str, parameter: str, chunk: int, holders: list[int]
) -> None:
    piece = _plan(naming=naming).by_name[tensor].pieces[0]
    assert piece.parameter.name == parameter
    assert piece.parameter.chunk == chunk
    assert list(piece.parameter.holders) == holders


def test_experts_divide_a_stage_anew() -> None:
    """8 ranks, TP 2, EP 4: a shard of attention is on every second, an expert on every fourth."""
    plan = _plan(MOE4, ParallelConfig(tensor=2, data=4, expert=4))
    (expert,) = plan.by_name["model.layers.0.mlp.experts.3.down_proj.weight"].pieces
    assert list(expert.parameter.holders) == [3, 7]
    shards = plan.by_name["model.layers.0.self_attn.o_proj.weight"].pieces
    assert [list(p.parameter.holders) for p in shards] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_dense_layer_fuses_its_second_norm_in_transformer_engine() -> None:
    plan = _plan(checkpoints.QWEN3, ParallelConfig(), "transformer_engine")
    (piece,) = plan.by_name["model.layers.1.post_attention_layernorm.weight"].pieces
    assert piece.parameter.name == "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        # (stage, chunk, layer within the chunk) of layers 0 to 7.
        (ParallelConfig(pipeline=2), [(s, 0, i) for s in (0, 1) for i in range(4)]),
        (
            ParallelConfig(pipeline=2, virtual=2),
            [(s, c, i) for c in (0, 1) for s in (0, 1) for i in (0, 1)],
        ),
        (
            ParallelConfig(pipeline=3, first_stage_layers=1, last_stage_layers=2),
            [(0, 0, 0), *((1, 0, i) for i in range(5)), (2, 0, 0), (2, 0, 1)],
        ),
        (
            ParallelConfig(pipeline=2, virtual=2, last_stage_layers=2),
            [
                (0, 0, 0),
                (0, 0, 1),
                (0, 0, 2),
                (1, 0, 0),
                (0, 1, 0),
                (0, 1, 1),
                (0, 1, 2),
                (1, 1, 0),
            ],
        ),
    ],
    ids=["even", "virtual", "uneven", "uneven virtual"],
)
def test_layers_are_on_megatrons_stages(
    layout: ParallelConfig, places: list[tuple[int, int, int]]
) -> None:
    plan = _plan(checkpoints.QWEN3 | {"num_hidden_layers": 8}, layout)
    for layer, (stage, chunk, local) in enumerate(places):
        (piece,) = plan.by_name[f"model.layers.{layer}.input_layernorm.weight"].pieces
        assert list(piece.parameter.holders) == [stage]
        assert piece.parameter.chunk == chunk
        assert piece.parameter.name == f"decoder.layers.{local}.input_layernorm.weight"
    last_chunk = (layout.virtual or 1) - 1
    head = plan.by_name["lm_head.weight"].pieces[0].parameter
    assert (head.holders[0], head.chunk) == (layout.pipeline - 1, last_chunk)


def test_a_tied_head_is_loaded_but_not_sent() -> None:
    plan = _plan(MOE4 | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in plan.by_name
    embedding = plan.by_name["model.embed_tokens.weight"]
    assert {p.parameter.name for p in embedding.pieces} == {"embedding.word_embeddings.weight"}
    assert {p.parameter.name for p in embedding.copies} == {"output_layer.weight"}
    held = {h.parameter.name: h for h in plan.held_by(7)}
    assert [name for name, _ in held["output_layer.weight"].pieces] == ["model.embed_tokens.weight"]
    # Without a pipeline the head is the embedding itself.
    alone = _plan(MOE4 | {"tie_word_embeddings": True}, ParallelConfig(tensor=2))
    assert alone.by_name["model.embed_tokens.weight"].copies == ()
    assert "output_layer.weight" not in {h.parameter.name for h in alone.held_by(0)}


Change = Callable[[HFTensor], HFTensor | None]


def _changed(change: Change, config: dict[str, Any] = MOE4) -> WeightPlan:
    """The plan with each tensor replaced by what the change makes of it."""
    plan = _plan(config)
    tensors = [new for tensor in plan.tensors if (new := change(tensor)) is not None]
    return dataclasses.replace(plan, tensors=tuple(tensors))


def _on(name: str, make: Change) -> Change:
    return lambda tensor: make(tensor) if tensor.name == name else tensor


def _with_pieces(tensor: HFTensor, *pieces: Piece) -> HFTensor:
    return dataclasses.replace(tensor, pieces=pieces)


QUERY = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def _transposed(tensor: HFTensor) -> HFTensor:
    (piece,) = tensor.pieces
    r = piece.target
    return _with_pieces(
        tensor, dataclasses.replace(piece, target=Rectangle(r.left, r.right, r.top, r.bottom))
    )


def _shifted(tensor: HFTensor) -> HFTensor:
    first, *rest = tensor.pieces
    r = first.target
    moved = dataclasses.replace(r, top=r.top + 1, bottom=r.bottom + 1)
    return _with_pieces(tensor, dataclasses.replace(first, target=moved), *rest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_on(UP, lambda tensor: None), rf"1 missing \(first: {UP}\)"),
        (_on(UP, lambda t: dataclasses.replace(t, name=UP + ".")), r"1 missing .*; 1 unknown"),
        (_on(UP, lambda t: dataclasses.replace(t, shape=(31, 64))), rf"{UP} has shape \[31, 64\]"),
        (_on(QUERY, lambda t: _with_pieces(t, *t.pieces[1:])), rf"{QUERY} .* no source for rows 0"),
        (_on(QUERY, lambda t: _with_pieces(t, *t.pieces[:-1])), rf"{QUERY} .* no source for rows"),
        (
            _on(QUERY, lambda t: _with_pieces(t, t.pieces[0], *t.pieces)),
            rf"{QUERY} .* two sources for columns 0 to 64",
        ),
        (_on(QUERY, _shifted), rf"{QUERY} .* no source for rows 0 to 1"),
        (_on(UP, _transposed), rf"{UP} .* has rows 32 to 64 beyond its end"),
    ],
    ids=["dropped", "misspelt", "misshapen", "first piece", "last piece", "twice", "shift", "turn"],
)
def test_a_wrong_plan_is_refused(change: Change, message: str) -> None:
    with pytest.raises(WeightPlanError, match=message):
        _changed(change).check()


def test_a_tensor_planned_twice_is_refused() -> None:
    plan = _plan()
    twice = dataclasses.replace(plan, tensors=(*plan.tensors, plan.by_name[UP]))
    with pytest.raises(WeightPlanError, match=f"{UP} occurs twice"):
        twice.check()


def test_local_expert_numbers_taken_for_global_are_refused() -> None:
    """Rank 1's experts are 2 and 3; counted from 0, two ranks send 0 and 1 and nobody 2 and 3."""
    plan = _plan()

    def renamed(tensor: HFTensor) -> HFTensor:
        for expert in (2, 3):
            local = f".experts.{expert - 2}."
            tensor = dataclasses.replace(
                tensor, name=tensor.name.replace(f".experts.{expert}.", local)
            )
        return tensor

    with pytest.raises(WeightPlanError, match=r"experts\.0\.gate_proj\.weight occurs twice"):
        dataclasses.replace(plan, tensors=tuple(map(renamed, plan.tensors))).check()
    # Both ranks' experts in one tensor, under one name.
    first, second = (plan.by_name[UP.replace(".3.", f".{e}.")] for e in (1, 3))
    both = _on(first.name, lambda t: _with_pieces(t, *first.pieces, *second.pieces))
    with pytest.raises(WeightPlanError, match=f"{first.name} .* two sources"):
        _changed(both).check()


def test_two_experts_from_one_parameter_are_refused() -> None:
    other = _plan().by_name[UP.replace(".3.", ".1.")].pieces
    with pytest.raises(WeightPlanError, match=r"local_experts\.1\.linear_fc1.* two sources"):
        _changed(_on(UP, lambda t: _with_pieces(t, *other))).check()


def test_a_piece_of_another_shape_than_its_place_is_refused() -> None:
    def narrowed(tensor: HFTensor) -> HFTensor:
        (piece,) = tensor.pieces
        narrow = dataclasses.replace(piece.source, right=piece.source.right - 1)
        return _with_pieces(tensor, dataclasses.replace(piece, source=narrow))

    with pytest.raises(WeightPlanError, match=f"{UP}: .* does not have the shape of its place"):
        _changed(_on(UP, narrowed)).check()


def test_coverage_cannot_tell_how_qkv_is_interleaved() -> None:
    """Why the certificate also compares log-probs: any permutation writes everything once."""
    plan = _plan(checkpoints.QWEN3, ParallelConfig())
    swapped = {"q": "q", "k": "v", "v": "k"}

    def swap(tensor: HFTensor) -> HFTensor:
        for x, y in swapped.items():
            if tensor.name.endswith(f"self_attn.{x}_proj.weight"):
                return _with_pieces(
                    tensor, *plan.by_name[tensor.name.replace(f"{x}_proj", f"{y}_proj")].pieces
                )
        return tensor

    dataclasses.replace(plan, tensors=tuple(map(swap, plan.tensors))).check()


class _Chunk(torch.nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(torch.empty(shape)))


def test_another_model_than_the_plans_is_refused() -> None:
    plan = _plan()
    shapes = {h.parameter.name: h.parameter.shape for h in plan.held_by(0)}
    plan.check_against_model([_Chunk(shapes)], 0)
    wrong = dict(shapes)
    wrong["decoder.layers.0.mlp.router.weight"] = (4, 63)
    with pytest.raises(WeightPlanError, match=r"rank 0 .*router.weight has shape \[4, 63\]"):
        plan.check_against_model([_Chunk(wrong)], 0)
    with pytest.raises(WeightPlanError, match=r"1 unknown \(first: chunk 0, extra.weight"):
        plan.check_against_model([_Chunk(shapes | {"extra.weight": (1,)})], 0)
    del wrong["decoder.layers.0.mlp.router.weight"]
    with pytest.raises(WeightPlanError, match=r"1 missing \(first: chunk 0, .*router.weight"):
        plan.check_against_model([_Chunk(wrong)], 0)


def test_another_checkpoint_than_the_plans_is_refused() -> None:
    plan = _plan(checkpoints.LLAMA | {"tie_word_embeddings": True}, ParallelConfig(tensor=2))
    found = hf_shapes(plan.architecture)
    allowed = {"lm_head.weight": (301, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}
    plan.check_against_checkpoint(found | allowed, "it")
    for wrong, message in (
        (found | {"model.norm.bias": (64,)}, "weights in it .* 1 unknown .*model.norm.bias"),
        ({k: v for k, v in found.items() if k != "model.norm.weight"}, "1 missing"),
        (found | {"model.norm.weight": (63,)}, r"model.norm.weight has shape \[63\], expected"),
    ):
        with pytest.raises(UserError, match=message):
            plan.check_against_checkpoint(wrong, "it")


def test_sources_are_near_and_spread_evenly() -> None:
    # 16 ranks on 4 nodes of 4: two stages of 8; experts on every second rank of a stage.
    layout = ParallelConfig(tensor=2, pipeline=2, data=4, expert=2)
    plan = _plan(MOE4, layout)
    destinations = (1, 6, 13)
    routes = Routes(plan, destinations, ranks_per_node=4)
    sent = dict.fromkeys(range(16), 0)
    for tensor in plan.tensors:
        for piece in tensor.pieces:
            holders = piece.parameter.holders
            for destination in destinations:
                source = routes.source(piece, destination)
                assert source in holders
                node = range(destination // 4 * 4, destination // 4 * 4 + 4)
                if destination in holders:
                    assert source == destination
                elif set(holders) & set(node):
                    assert source in node
                else:
                    sent[source] += piece.target.numel
    # Stage 1 lies on nodes 2 and 3: destinations 1 and 6 get it from afar, from all its replicas.
    stage_1 = sum(
        piece.target.numel
        for tensor in plan.tensors
        for piece in tensor.pieces
        if piece.parameter.holders[0] >= 8
    )
    far = [sent[rank] for rank in range(8, 16)]
    assert sum(far) == 2 * stage_1
    assert max(far) < 1.5 * sum(far) / len(far)


def test_replicas_are_read_by_different_destinations() -> None:
    plan = _plan(MOE4, ParallelConfig(pipeline=2, data=4))
    routes = Routes(plan, (0, 1), ranks_per_node=1)
    (piece,) = plan.by_name["model.norm.weight"].pieces
    assert routes.source(piece, 0) != routes.source(piece, 1)


def test_every_destination_gets_the_whole_model() -> None:
    plan = _plan(QWEN3_30B, ParallelConfig(tensor=4, pipeline=2, data=8, expert=8))
    traffic = Routes(plan, (0, 8, 63), ranks_per_node=8).traffic()
    got = dict.fromkeys((0, 8, 63), 0)
    for moved in (traffic.within_node, traffic.between_nodes):
        for (_, destination), numel in moved.items():
            got[destination] += numel
    assert set(got.values()) == {30_532_122_624}
    assert all(s // 8 == d // 8 for s, d in traffic.within_node)
    assert all(s // 8 != d // 8 for s, d in traffic.between_nodes)


@pytest.mark.parametrize("destinations", [(0, 0), (8,), (-1,)])
def test_destinations_must_be_different_ranks(destinations: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="different ranks below 8"):
        Routes(_plan(), destinations)


def test_bytes_on_the_engines_side() -> None:
    expert = "model.layers.0.mlp.experts.5.up_proj.weight"
    assert engine_bytes(expert, (768, 2048), "none") == TensorBytes(2 * 768 * 2048)
    assert engine_bytes(expert, (768, 2048), "block_fp8") == TensorBytes(768 * 2048, 4 * 6 * 16)
    ragged = engine_bytes("model.layers.0.self_attn.k_proj.weight", (129, 300), "block_fp8")
    assert ragged == TensorBytes(129 * 300, 4 * 2 * 3)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert engine_bytes(name, (128, 256), "block_fp8") == TensorBytes(2 * 128 * 256)


MODEL_30B = parse_architecture(QWEN3_30B)
SMALL_HEADS = parse_architecture(
    checkpoints.LLAMA
    | {
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1024,
    }
)


@pytest.mark.parametrize(
    ("tensor_parallel", "quantization", "expert_parallel"),
    [(4, "none", False), (8, "none", False), (2, "block_fp8", False), (4, "block_fp8", True)],
)
def test_engine_layouts_that_fit(
    tensor_parallel: int, quantization: Any, expert_parallel: bool
) -> None:
    check_engine_layout(MODEL_30B, tensor_parallel, quantization, expert_parallel=expert_parallel)


@pytest.mark.parametrize(
    ("tensor_parallel", "quantization", "message"),
    [
        (3, "none", "divide the model's 32 attention heads"),
        (6, "none", "no multiple of the model's 4 key-value heads"),
        # 768 / 4 = 192, which is one and a half blocks.
        (4, "block_fp8", "192 FFN columns.*possible sizes are 1, 2, .*enable_expert_parallel"),
    ],
)
def test_engine_layouts_that_do_not_fit(
    tensor_parallel: int, quantization: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_engine_layout(MODEL_30B, tensor_parallel, quantization)


def test_repeated_key_value_heads_must_fill_a_block_too() -> None:
    check_engine_layout(SMALL_HEADS, 8, "none")
    with pytest.raises(UserError, match=r"64 key-value rows.*possible sizes are 1, 2\Z"):
        check_engine_layout(SMALL_HEADS, 8, "block_fp8")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelConfig(tensor=4), None),
        (ParallelConfig(tensor=3), "a divisor or a multiple of the model's 4 key-value heads"),
        (ParallelConfig(tensor=6), "a divisor or a multiple of the model's 4 key-value heads"),
    ],
)
def test_key_value_heads_and_ranks_must_divide_each_other(
    layout: ParallelConfig, message: str | None
) -> None:
    model = parse_architecture(
        checkpoints.LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 4}
    )
    if message is None:
        layout.check(model)
        return
    with pytest.raises(UserError, match=message):
        layout.check(model)
