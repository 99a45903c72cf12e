# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations on a rank: what micro-batches in flight keep, and what backward adds."""

from dataclasses import dataclass
from typing import Any

from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.planning.parameters import stage_layers
from megatron.rl.planning.precision import TrainingPrecision
from megatron.rl.planning.saved_tensors import Saved, saved_tensors, token_bytes

DEFAULT_SELECTIVE_MODULES = ("core_attn",)


@dataclass(frozen=True)
class Recompute:
    """Megatron's recomputation settings, under its own names."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()

    @classmethod
    def of(cls, transformer: dict[str, Any]) -> "Recompute":
        """Read the fields of ``megatron.transformer``."""
        granularity = transformer.get("recompute_granularity")
        modules: tuple[str, ...] = ()
        if granularity == "selective":
            modules = tuple(transformer.get("recompute_modules") or DEFAULT_SELECTIVE_MODULES)
        return cls(
            granularity,
            transformer.get("recompute_method"),
            transformer.get("recompute_num_layers"),
            modules,
        )

    def describe(self) -> str:
        if self.granularity is None:
            return "none"
        if self.granularity == "selective":
            return f"selective ({', '.join(self.modules)})"
        return f"full ({self.method}, {self.num_layers})"


@dataclass(frozen=True)
class ActivationBytes:
    """Of one rank.

    Attributes:
        kept: for backward, by all micro-batches in flight.
        working: on top of that in the backward pass of one layer: what is computed again, and the
            gradients of its widest tensors.
    """

    kept: int
    working: int


def activation_bytes(
    model: Architecture,
    layout: ParallelConfig,
    precision: TrainingPrecision,
    recompute: Recompute,
    *,
    stage: int,
    tokens: int,
    micro_batches: int,
    imbalance: float,
) -> ActivationBytes:
    """Predict the activations of a rank of a pipeline stage.

    Args:
        tokens: of a micro-batch, on one context-parallel rank.
        micro_batches: of an optimizer step.
        imbalance: see :func:`token_bytes`.
    """

    def size(items: list[Saved]) -> float:
        return tokens * token_bytes(items, model, layout, imbalance)

    saved = saved_tensors(model, precision)
    layers = stage_layers(model, layout, stage)
    whole = size(saved)
    layer_input = size(
        [Saved("layer input", model.hidden_size, "sequence", precision.weight_bytes)]
    )
    dropped = 0.0
    if recompute.granularity == "full":
        step = recompute.num_layers or 1
        if recompute.method == "block":
            kept = min(step, layers) * whole + max(0, layers - step) * layer_input
            dropped = whole - layer_input
        else:
            kept = -(-layers // step) * layer_input
            dropped = min(step, layers) * whole - layer_input
    else:
        left = [item for item in saved if not set(item.modules) & set(recompute.modules)]
        kept = layers * size(left)
        dropped = whole - size(left)
    kept *= micro_batches_in_flight(layout, stage, micro_batches)
    if stage == layout.pipeline - 1:
        # The final norm: its input, its output, and with the local modules one tensor between.
        tensors = 3 if precision.modules == "local" else 2
        kept += tensors * layer_input
    return ActivationBytes(int(kept), int(dropped + size(_widest_gradients(model, precision))))


def micro_batches_in_flight(layout: ParallelConfig, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches' activations a stage holds at most, in whole stages' worth.

    Megatron's schedules: one forward one backward keeps ``pipeline - stage`` of them; the
    interleaved one warms up with ``2 (pipeline - stage - 1) + (virtual - 1) pipeline`` chunks, of
    which ``virtual`` make a stage (schedules.get_pp_rank_microbatches).
    """
    if layout.pipeline == 1:
        return 1
    ahead = layout.pipeline - stage - 1
    if layout.virtual is None:
        return min(ahead + 1, micro_batches)
    chunks = 2 * ahead + (layout.virtual - 1) * layout.pipeline + 1
    return min(chunks, micro_batches * layout.virtual) / layout.virtual


def _widest_gradients(model: Architecture, precision: TrainingPrecision) -> list[Saved]:
    """Gradients that live together in backward: of a SwiGLU's inputs and output, and of a token."""
    width = precision.weight_bytes
    if model.is_moe:
        return [
            Saved("SwiGLU gradients", 4 * model.moe_ffn_hidden_size, "expert", width),
            Saved("token gradients", 2 * model.hidden_size, "expert", width),
        ]
    return [
        Saved("SwiGLU gradients", 4 * model.ffn_hidden_size, "tensor", width),
        Saved("token gradients", 2 * model.hidden_size, "sequence", width),
    ]
