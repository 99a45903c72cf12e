# SPDX-License-Identifier: Apache-2.0
"""Which Megatron parameter is which Hugging Face tensor: one table, read in both directions.

A rule pairs a Megatron parameter with the Hugging Face tensors that it holds and their shapes, and
says how they are joined and sharded (a :class:`Join`). ``{layer}`` and ``{expert}`` are global
numbers in Hugging Face names, and numbers within a rank in Megatron's.

Parameters are named as Megatron's local modules name them (CPU) and as Transformer Engine's do
(GPU), which fuse a norm into the linear layer behind it and number grouped experts differently.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from megatron.rl.model.architecture import Architecture

Naming = Literal["local", "transformer_engine"]
Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Join(Enum):
    """How Hugging Face tensors make up one whole Megatron parameter, and its sharded dimension."""

    WHOLE = "one tensor, the same on every tensor-parallel rank"
    VOCAB = "one tensor, rows padded at the end, rows sharded"
    COLUMNS = "one tensor, columns sharded"
    QKV = "q, k, v interleaved by key-value group, rows sharded"
    GATE_UP = "gate above up within each shard, rows sharded"


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        local: name of the parameter among Megatron's local modules.
        transformer_engine: its name among Transformer Engine's.
        hf: Hugging Face names and shapes, in the order that the parameter holds them.
        join: how the parameter holds them.
    """

    local: str
    transformer_engine: str
    hf: dict[str, Shape]
    join: Join

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.local

    def parameter(self, naming: Naming) -> str:
        """Return the parameter's name, with ``{layer}`` and ``{expert}`` to be filled in."""
        return self.local if naming == "local" else self.transformer_engine


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."


def _rule(local: str, hf: dict[str, Shape], join: Join, te: str | None = None) -> Rule:
    return Rule(local, te or local, hf, join)


def embedding_rule(model: Architecture) -> Rule:
    """Return the rule of the embedding."""
    shape = (model.vocab_size, model.hidden_size)
    return _rule("embedding.word_embeddings.weight", {EMBEDDING: shape}, Join.VOCAB)


def head_rule(model: Architecture) -> Rule:
    """Return the rule of the last stage's head, which holds the embedding when tied."""
    name = EMBEDDING if model.tied_embeddings else HEAD
    shape = (model.vocab_size, model.hidden_size)
    return _rule("output_layer.weight", {name: shape}, Join.VOCAB)


def final_norm_rule(model: Architecture) -> Rule:
    """Return the rule of the norm in front of the head."""
    return _rule(
        "decoder.final_layernorm.weight", {"model.norm.weight": (model.hidden_size,)}, Join.WHOLE
    )


def layer_rules(model: Architecture) -> list[Rule]:
    """Return the rules of one layer, experts last."""
    return _attention_rules(model) + (_moe_rules(model) if model.is_moe else _mlp_rules(model))


def _attention_rules(model: Architecture) -> list[Rule]:
    hidden, attention = model.hidden_size, _HF_LAYER + "self_attn."
    q_rows, kv_rows = model.num_heads * model.head_dim, model.num_groups * model.head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    rules = [
        _rule(
            _LAYER + "input_layernorm.weight",
            {_HF_LAYER + "input_layernorm.weight": (hidden,)},
            Join.WHOLE,
            te=_LAYER + "self_attention.linear_qkv.layer_norm_weight",
        ),
        _rule(
            _LAYER + "self_attention.linear_qkv.weight",
            {f"{attention}{x}_proj.weight": (n, hidden) for x, n in rows.items()},
            Join.QKV,
        ),
        _rule(
            _LAYER + "self_attention.linear_proj.weight",
            {attention + "o_proj.weight": (hidden, q_rows)},
            Join.COLUMNS,
        ),
    ]
    if model.qk_norm:
        rules += [
            _rule(
                f"{_LAYER}self_attention.{x}_layernorm.weight",
                {f"{attention}{x}_norm.weight": (model.head_dim,)},
                Join.WHOLE,
            )
            for x in "qk"
        ]
    return rules


def _mlp_rules(model: Architecture) -> list[Rule]:
    hidden, ffn, mlp = model.hidden_size, model.ffn_hidden_size, _HF_LAYER + "mlp."
    return [
        _rule(
            _LAYER + "pre_mlp_layernorm.weight",
            {_HF_LAYER + "post_attention_layernorm.weight": (hidden,)},
            Join.WHOLE,
            te=_LAYER + "mlp.linear_fc1.layer_norm_weight",
        ),
        _rule(
            _LAYER + "mlp.linear_fc1.weight",
            {f"{mlp}{x}_proj.weight": (ffn, hidden) for x in ("gate", "up")},
            Join.GATE_UP,
        ),
        _rule(
            _LAYER + "mlp.linear_fc2.weight",
            {mlp + "down_proj.weight": (hidden, ffn)},
            Join.COLUMNS,
        ),
    ]


def _moe_rules(model: Architecture) -> list[Rule]:
    hidden, ffn = model.hidden_size, model.moe_ffn_hidden_size
    expert = _HF_LAYER + "mlp.experts.{expert}."
    return [
        _rule(
            _LAYER + "pre_mlp_layernorm.weight",
            {_HF_LAYER + "post_attention_layernorm.weight": (hidden,)},
            Join.WHOLE,
        ),
        _rule(
            _LAYER + "mlp.router.weight",
            {_HF_LAYER + "mlp.gate.weight": (model.num_experts, hidden)},
            Join.WHOLE,
        ),
        _rule(
            _EXPERTS + "local_experts.{expert}.linear_fc1.weight",
            {f"{expert}{x}_proj.weight": (ffn, hidden) for x in ("gate", "up")},
            Join.GATE_UP,
            te=_EXPERTS + "linear_fc1.weight{expert}",
        ),
        _rule(
            _EXPERTS + "local_experts.{expert}.linear_fc2.weight",
            {expert + "down_proj.weight": (hidden, ffn)},
            Join.COLUMNS,
            te=_EXPERTS + "linear_fc2.weight{expert}",
        ),
    ]


def hf_shapes(model: Architecture) -> dict[str, Shape]:
    """Return name and shape of every tensor in a Hugging Face checkpoint of the model.

    The order is that of the model: embedding, layers, norm, head.
    """
    shapes = dict(embedding_rule(model).hf)
    for layer in range(model.num_layers):
        for rule in layer_rules(model):
            for expert in range(model.num_experts) if rule.is_expert else (0,):
                for name, shape in rule.hf.items():
                    shapes[name.format(layer=layer, expert=expert)] = shape
    return shapes | final_norm_rule(model).hf | head_rule(model).hf
