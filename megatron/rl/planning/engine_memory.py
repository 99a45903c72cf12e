# SPDX-License-Identifier: Apache-2.0
"""Bytes of a rollout engine on each of its GPUs: weights, KV cache, and how much of that fits."""

import functools
from dataclasses import dataclass

from megatron.rl.config import Config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.planning.precision import DTYPE_BYTES, FLOAT32_BYTES
from megatron.rl.rollout.from_config import engine_dtype
from megatron.rl.weights.engine_layout import (
    BF16_BYTES,
    Quantization,
    check_engine_layout,
    engine_bytes,
)
from megatron.rl.weights.names import (
    Join,
    Shape,
    embedding_rule,
    final_norm_rule,
    head_rule,
    layer_rules,
)

GIB = 1 << 30
# vLLM 0.32: CacheConfig.gpu_memory_utilization.
DEFAULT_UTILIZATION = 0.92
# KV cache of an engine on CPU where the config names none (client/engine_config.py).
CPU_KV_CACHE_GIB = 1.0
# Copies of the logits of a decoding step: as computed, as float32 log-probs, and sorted for top-K.
_SAMPLER_COPIES = 3


@dataclass(frozen=True)
class EngineShape:
    """How an engine is laid out, from ``rollout.engine_args``."""

    tensor: int
    pipeline: int
    data: int
    experts_whole: bool

    @classmethod
    def of(cls, config: Config) -> "EngineShape":
        arguments = config.rollout.engine_args
        return cls(
            int(arguments.get("tensor_parallel_size", 1)),
            int(arguments.get("pipeline_parallel_size", 1)),
            int(arguments.get("data_parallel_size", 1)),
            bool(arguments.get("enable_expert_parallel", False)),
        )

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class EngineBytes:
    """Of one GPU of an engine.

    Attributes:
        weights: as the engine holds them.
        sampler: logits and log-probs of a decoding step.
        kv_a_token: KV cache of one token.
        kv_wanted: for ``rollout.max_num_seqs`` sequences of the greatest length.
    """

    weights: int
    sampler: int
    kv_a_token: int
    kv_wanted: int


def engine_memory(config: Config, model: Architecture) -> EngineBytes:
    """Predict the engine's bytes on each of its GPUs.

    Raises:
        UserError: the engine cannot be laid out so; the message lists the sizes that can be.
    """
    shape = EngineShape.of(config)
    # An engine on CPU takes FP8 blocks apart at its door.
    quantization: Quantization = "none"
    if config.run.device != "cpu":
        quantization = config.bridge.quantization
    check_engine_layout(model, shape.tensor, quantization, expert_parallel=shape.experts_whole)
    if model.num_layers % shape.pipeline:
        raise UserError(
            f"rollout.engine_args.pipeline_parallel_size is {shape.pipeline}, which does not "
            f"divide the model's {model.num_layers} layers"
        )
    width = DTYPE_BYTES[engine_dtype(config)]
    cache_dtype = str(config.rollout.engine_args.get("kv_cache_dtype", "auto"))
    kv_width = 1 if cache_dtype.startswith("fp8") else width
    groups = max(1, model.num_groups // shape.tensor)
    kv_a_token = 2 * model.num_layers // shape.pipeline * groups * model.head_dim * kv_width
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    sampler = config.rollout.max_num_seqs * model.vocab_size * FLOAT32_BYTES * _SAMPLER_COPIES
    return EngineBytes(
        weights=_weight_bytes(model, shape, quantization, width),
        sampler=sampler,
        kv_a_token=kv_a_token,
        kv_wanted=kv_a_token * longest * config.rollout.max_num_seqs,
    )


def checkpoint_bytes(config: Config, model: Architecture) -> int:
    """Bytes of one complete set of weights as it travels to an engine."""
    return _travelling_bytes(model, config.bridge.quantization, DTYPE_BYTES[engine_dtype(config)])


@functools.cache
def _travelling_bytes(model: Architecture, quantization: Quantization, width: int) -> int:
    rules = layer_rules(model)
    total = 0
    for rule in (*rules, embedding_rule(model), final_norm_rule(model), head_rule(model)):
        if rule.local == head_rule(model).local and model.tied_embeddings:
            continue
        copies = model.num_layers if rule in rules else 1
        copies *= model.num_experts if rule.is_expert else 1
        for name, shape in rule.hf.items():
            total += copies * _stored(name, shape, quantization, width)
    return total


def _stored(name: str, shape: Shape, quantization: Quantization, width: int) -> int:
    """Bytes of a tensor: quantised, or with so many bytes an element."""
    size = engine_bytes(name, shape, quantization)
    return size.total if size.scales else size.data // BF16_BYTES * width


@functools.cache
def _weight_bytes(
    model: Architecture, shape: EngineShape, quantization: Quantization, width: int
) -> int:
    total = 0.0
    layers = model.num_layers / shape.pipeline
    for rule in layer_rules(model):
        copies = model.num_experts if rule.is_expert else 1
        for name, hf_shape in rule.hf.items():
            stored = _stored(name, hf_shape, quantization, width)
            total += layers * copies * stored / _ways(rule.join, name, model, shape)
    vocab = model.vocab_size * model.hidden_size * width / shape.tensor
    norm = model.hidden_size * width
    return int(total + norm + vocab * (1 if model.tied_embeddings else 2))


def _ways(join: Join, name: str, model: Architecture, shape: EngineShape) -> int:
    """Over how many GPUs the engine divides a tensor; experts by columns or whole, as many."""
    if join is Join.WHOLE:
        return 1
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return min(shape.tensor, model.num_groups)
    return shape.tensor
