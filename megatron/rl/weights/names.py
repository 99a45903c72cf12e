# SPDX-License-Identifier: Apache-2.0
"""Which Megatron parameter is which Hugging Face tensor: one table, read in both directions.

A rule pairs the name of a Megatron parameter with the Hugging Face tensors that it holds, and says
how they are joined and sharded (a :class:`Join`). ``{layer}`` and ``{expert}`` are global numbers;
Megatron numbers both within a rank, so :func:`locate` adds this rank's offsets.

Parameters are named as Megatron's local modules name them (CPU) and as Transformer Engine's do
(GPU), which fuse a norm into the linear layer behind it and number grouped experts differently.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron.rl.model.architecture import Architecture


class Join(Enum):
    """How Hugging Face tensors make up one whole Megatron parameter, and its sharded dimension."""

    WHOLE = "one tensor, the same on every tensor-parallel rank"
    VOCAB = "one tensor, rows padded at the end, rows sharded"
    COLUMNS = "one tensor, columns sharded"
    QKV = "q, k, v interleaved by key-value group, rows sharded"
    GATE_UP = "gate above up within each shard, rows sharded"


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    megatron: str
    hf: tuple[str, ...]
    join: Join

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron


_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_FUSED_FC1 = "mlp.linear_fc1."
_EXPERT_HF = _HF + "mlp.experts.{expert}."

RULES: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Join.VOCAB),
    Rule("output_layer.weight", ("lm_head.weight",), Join.VOCAB),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Join.WHOLE),
    Rule(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(f"{_HF}self_attn.{x}_proj.weight" for x in "qkv"),
        Join.QKV,
    ),
    Rule(
        _LAYER + "self_attention.linear_proj.weight",
        (_HF + "self_attn.o_proj.weight",),
        Join.COLUMNS,
    ),
    *(
        Rule(
            _LAYER + f"self_attention.{x}_layernorm.weight",
            (_HF + f"self_attn.{x}_norm.weight",),
            Join.WHOLE,
        )
        for x in "qk"
    ),
    *(
        Rule(_LAYER + name, (_HF + "input_layernorm.weight",), Join.WHOLE)
        for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    ),
    *(
        Rule(_LAYER + name, (_HF + "post_attention_layernorm.weight",), Join.WHOLE)
        for name in ("pre_mlp_layernorm.weight", _FUSED_FC1 + "layer_norm_weight")
    ),
    Rule(_LAYER + "mlp.router.weight", (_HF + "mlp.gate.weight",), Join.WHOLE),
    Rule(
        _LAYER + _FUSED_FC1 + "weight",
        tuple(f"{_HF}mlp.{x}_proj.weight" for x in ("gate", "up")),
        Join.GATE_UP,
    ),
    Rule(_LAYER + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Join.COLUMNS),
    *(
        Rule(
            _LAYER + "mlp.experts." + name,
            tuple(f"{_EXPERT_HF}{x}_proj.weight" for x in ("gate", "up")),
            Join.GATE_UP,
        )
        for name in ("local_experts.{expert}.linear_fc1.weight", "linear_fc1.weight{expert}")
    ),
    *(
        Rule(_LAYER + "mlp.experts." + name, (_EXPERT_HF + "down_proj.weight",), Join.COLUMNS)
        for name in ("local_experts.{expert}.linear_fc2.weight", "linear_fc2.weight{expert}")
    ),
)


def _pattern(rule: Rule) -> re.Pattern[str]:
    escaped = re.escape(rule.megatron)
    for key in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{key}}}"), rf"(?P<{key}>\d+)")
    return re.compile(escaped + r"\Z")


_PATTERNS = tuple((_pattern(rule), rule) for rule in RULES)


@dataclass(frozen=True)
class Location:
    """A parameter of this rank: its rule and the Hugging Face tensors that it holds a part of."""

    parameter: str
    rule: Rule
    hf_names: tuple[str, ...]


def locate(
    parameter: str, *, layer_offset: int = 0, expert_offset: int = 0, tied: bool = False
) -> Location:
    """Find the Hugging Face names of a Megatron parameter.

    Args:
        parameter: name within this rank's model, as in ``named_parameters()``.
        layer_offset: global number of this rank's layer 0.
        expert_offset: global number of this rank's expert 0.
        tied: the head shares the embedding's tensor.

    Raises:
        KeyError: no rule knows the parameter.
    """
    for pattern, rule in _PATTERNS:
        match = pattern.match(parameter)
        if match is None:
            continue
        numbers = {key: int(value) for key, value in match.groupdict().items()}
        if "layer" in numbers:
            numbers["layer"] += layer_offset
        if "expert" in numbers:
            numbers["expert"] += expert_offset
        hf_names = tuple(name.format(**numbers) for name in rule.hf)
        if tied and parameter == "output_layer.weight":
            hf_names = ("model.embed_tokens.weight",)
        return Location(parameter, rule, hf_names)
    raise KeyError(f"no rule maps the Megatron parameter {parameter!r} to Hugging Face names")


def expected_hf_names(model: Architecture) -> Iterator[str]:
    """Yield the name of every tensor in a Hugging Face checkpoint of the model."""
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not model.tied_embeddings:
        yield "lm_head.weight"
    per_layer = ["input_layernorm", "post_attention_layernorm"]
    per_layer += [f"self_attn.{x}_proj" for x in "qkvo"] + [f"self_attn.{x}_norm" for x in "qk"]
    projections = ("gate_proj", "up_proj", "down_proj")
    if model.is_moe:
        per_layer += ["mlp.gate"]
        per_layer += [f"mlp.experts.{e}.{p}" for e in range(model.num_experts) for p in projections]
    else:
        per_layer += [f"mlp.{p}" for p in projections]
    for layer in range(model.num_layers):
        yield from (f"model.layers.{layer}.{name}.weight" for name in per_layer)


def shards_to_hf(rule: Rule, shards: Sequence[Tensor], model: Architecture) -> list[Tensor]:
    """Join the tensor-parallel shards of one parameter into its Hugging Face tensors.

    Args:
        rule: from :func:`locate`.
        shards: one tensor per tensor-parallel rank, in order; a single one for experts.
        model: gives heads, groups and the true vocabulary size.

    Returns:
        The tensors in the order of ``rule.hf``.
    """
    if rule.join is Join.WHOLE:
        return [shards[0]]
    if rule.join is Join.VOCAB:
        return [torch.cat(list(shards))[: model.vocab_size]]
    if rule.join is Join.COLUMNS:
        return [torch.cat(list(shards), dim=1)]
    if rule.join is Join.GATE_UP:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    blocks = torch.cat(list(shards)).unflatten(0, (model.num_groups, -1, model.head_dim))
    heads = model.num_heads // model.num_groups
    q, k, v = blocks.split((heads, 1, 1), dim=1)  # [groups, heads | 1 | 1, head_dim, H]
    return [part.flatten(0, 2) for part in (q, k, v)]


def hf_to_shard(
    rule: Rule,
    read: Sequence[Callable[[], Tensor]],
    model: Architecture,
    *,
    rank: int,
    world_size: int,
    padded_rows: int,
) -> Tensor:
    """Cut this rank's shard of one parameter out of its Hugging Face tensors.

    Args:
        rule: from :func:`locate`.
        read: returns each Hugging Face tensor, in the order of ``rule.hf``.
        rank: tensor-parallel rank (0 for experts).
        world_size: tensor-parallel size (1 for experts).
        padded_rows: rows of the whole vocabulary parameter; padding rows are zero.
    """
    parts = [get() for get in read]
    if rule.join is Join.WHOLE:
        return parts[0]
    if rule.join is Join.VOCAB:
        whole = parts[0].new_zeros(padded_rows, parts[0].size(1))
        whole[: model.vocab_size] = parts[0]
        return whole.chunk(world_size)[rank]
    if rule.join is Join.COLUMNS:
        return parts[0].chunk(world_size, dim=1)[rank]
    if rule.join is Join.GATE_UP:
        return torch.cat([part.chunk(world_size)[rank] for part in parts])
    shape = (model.num_groups, -1, model.head_dim)
    blocks = torch.cat([part.unflatten(0, shape) for part in parts], dim=1)
    return blocks.flatten(0, 2).chunk(world_size)[rank]
