# SPDX-License-Identifier: Apache-2.0
"""How many parameters a rank holds, from the table of names that the weight bridge reads too.

The weight plan (:mod:`megatron.rl.weights.plan`) lists every shard, which a search over layouts has
no time for. The counts here come from the same rules, and tests hold them equal to the plan's and
to those of Megatron's own modules.
"""

import functools
from dataclasses import dataclass

from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.weights.joins import whole
from megatron.rl.weights.names import (
    Join,
    Rule,
    embedding_rule,
    final_norm_rule,
    head_rule,
    layer_rules,
)

# Of a layer these are matrix products: what FP8 training quantises, and what costs FLOPs.
_LINEAR_JOINS = (Join.QKV, Join.COLUMNS, Join.GATE_UP)


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank.

    Attributes:
        dense: all but the experts', vocabulary padding included.
        expert: those of its experts.
        linear: of both, those of linear layers inside the transformer layers, without the router.
        head: of ``dense``, those of the output layer; 0 where the stage has none or it is tied to
            the embedding of the same stage.
    """

    dense: int
    expert: int
    linear: int
    head: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@functools.lru_cache(maxsize=1024)
def rank_parameters(model: Architecture, layout: ParallelConfig, stage: int) -> RankParameters:
    """Count the parameters of each rank of a pipeline stage; its ranks have equally many."""
    layers = stage_layers(model, layout, stage)
    dense = expert = linear = head = 0
    for rule in layer_rules(model):
        count = layers * _shard_numel(rule, model, layout)
        if rule.is_expert:
            expert += count
        else:
            dense += count
        if rule.join in _LINEAR_JOINS:
            linear += count
    vocab = layout.padded_vocab_size(model.vocab_size) // layout.tensor * model.hidden_size
    if stage == 0:
        dense += vocab
    if stage == layout.pipeline - 1:
        dense += _shard_numel(final_norm_rule(model), model, layout)
        if not model.tied_embeddings or layout.pipeline > 1:
            dense += vocab
            head = vocab
    return RankParameters(dense, expert, linear, head)


def stage_layers(model: Architecture, layout: ParallelConfig, stage: int) -> int:
    """Return how many transformer layers a pipeline stage has."""
    return sum(run.count for run in layout.layer_runs(model.num_layers) if run.stage == stage)


def total_parameters(model: Architecture) -> int:
    """Count the parameters of a checkpoint: no padding, a tied head once."""
    return _vocab_and_norm(model) + model.num_layers * sum(
        _whole_numel(rule) * (model.num_experts if rule.is_expert else 1)
        for rule in layer_rules(model)
    )


def active_parameters(model: Architecture) -> int:
    """Count those that a token meets: of the experts only the ones it is sent to."""
    return _vocab_and_norm(model) + model.num_layers * sum(
        _whole_numel(rule) * (model.experts_per_token if rule.is_expert else 1)
        for rule in layer_rules(model)
    )


@functools.cache
def layer_matmul_parameters(model: Architecture, within: str = "") -> int:
    """Count the parameters of one layer that multiply a token: linear layers and the router.

    Args:
        within: a part of the layer, by Megatron's name of it, for example ".mlp.".
    """
    return sum(
        _whole_numel(rule) * (model.experts_per_token if rule.is_expert else 1)
        for rule in layer_rules(model)
        if within in rule.local and (rule.join in _LINEAR_JOINS or ".router." in rule.local)
    )


def _vocab_and_norm(model: Architecture) -> int:
    rules = [embedding_rule(model), final_norm_rule(model)]
    if not model.tied_embeddings:
        rules.append(head_rule(model))
    return sum(map(_whole_numel, rules))


def _whole_numel(rule: Rule) -> int:
    return sum(whole(shape).numel for shape in rule.hf.values())


def _shard_numel(rule: Rule, model: Architecture, layout: ParallelConfig) -> int:
    """Elements of one rank for one layer of a rule that is not of the vocabulary."""
    numel = _whole_numel(rule)
    if rule.is_expert:
        return numel * model.num_experts // layout.expert
    return numel if rule.join is Join.WHOLE else numel // layout.tensor
