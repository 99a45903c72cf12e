# SPDX-License-Identifier: Apache-2.0
"""What Megatron's ``pretrain()`` is given: this project's model, iterator and forward step.

The model is built by Megatron's ``GPTModelBuilder`` from Megatron's arguments, with our layer spec
and the weights of a Hugging Face checkpoint; the loss is the head that the trainer of this project
uses. One training iteration is one optimizer step on one minibatch.
"""

import argparse
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from torch import Tensor

from megatron.rl import cpu_backend
from megatron.rl.batch import IntArray, MicroBatch
from megatron.rl.config import Config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.model.build import (
    RESERVED_TRANSFORMER_FIELDS,
    BuildOptions,
    layer_spec,
    parameter_naming,
    transformer_config,
)
from megatron.rl.model.fp8 import fp8_settings
from megatron.rl.model.fp8_requirements import require_transformer_engine
from megatron.rl.policy.head import HeadContext, PolicyHead, TokenRecord
from megatron.rl.policy.step import forward_step
from megatron.rl.weights.load import load_hf_checkpoint
from megatron.rl.weights.plan import plan_weights

# Where a name of TransformerConfig is another one's flag.
_FLAGS = {
    "num_moe_experts": "--num-experts",
    "num_query_groups": "--group-query-attention --num-query-groups",
    "layernorm_epsilon": "--norm-epsilon",
    "gated_linear_unit": "--swiglu",
    "activation_func": "--swiglu",
    "add_bias_linear": "--disable-bias-linear",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "params_dtype": "--bf16",
    "pipeline_dtype": "--bf16",
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}

# Not the model's: how it is built. Set below, or by Megatron.
_BUILDING = frozenset({"use_cpu_initialization", "perform_initialization"})


class MinibatchIterator(RerunDataIterator):
    """The micro-batches of one optimizer step, and what the loss saw of them.

    Attributes:
        records, losses: one a micro-batch on the last pipeline stage, in order; empty elsewhere.
    """

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        super().__init__(iter(micro_batches))
        self.records: list[TokenRecord] = []
        self.losses: list[Tensor] = []

    def rewind(self) -> None:
        """Start over: Megatron repeats a step to tell a fault from a bad batch."""
        super().rewind()
        self.records.clear()
        self.losses.clear()


def use_prebuilt_helpers() -> None:
    """Keep Megatron from compiling its dataset index builder where a wheel brought it built.

    initialize.py:155 runs ``make`` in ``megatron/core/datasets`` on every start and exits when it
    fails (utils.py, compile_helpers); the wheel has the built module and no Makefile.
    """
    from megatron.training import initialize

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        initialize._compile_dependencies = lambda: None


def pretrain_config(args: argparse.Namespace, config: Config, architecture: Architecture) -> Any:
    """Return the ``cfg_container`` of ``pretrain()``: Megatron's arguments, this project's model.

    Raises:
        UserError: an argument differs from the checkpoint or the loss's needs; names the flag.
    """
    layout = config.parallel
    layout.check(architecture)
    if not cpu_backend.is_installed():
        require_transformer_engine(fp8_settings(config))
    # arguments.py:1232 has just set it to False; packed micro-batches differ in length.
    args.variable_seq_lengths = True
    args.padded_vocab_size = layout.padded_vocab_size(architecture.vocab_size)
    model = gpt_config_from_args(args)
    _check_model(model, config, architecture)
    model.transformer.perform_initialization = False  # the checkpoint's weights replace it
    model.transformer_layer_spec = lambda built, vp_stage=None: layer_spec(
        built.transformer, vp_stage
    )

    def load(chunks: list[GPTModel]) -> list[GPTModel]:
        plan = plan_weights(architecture, layout, parameter_naming())
        load_hf_checkpoint(chunks, plan, config.model.path, rank=torch.distributed.get_rank())
        return chunks

    model.pre_wrap_hooks.append(load)
    return pretrain_cfg_container_from_args(args, model)


def _check_model(model: Any, config: Config, architecture: Architecture) -> None:
    """Compare what the arguments say with what the checkpoint and the loss need."""
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    needed = transformer_config(architecture, config.parallel, BuildOptions(dtype))
    names = sorted(RESERVED_TRANSFORMER_FIELDS - _BUILDING)
    assert set(names) <= {f.name for f in fields(needed)}
    pairs = {name: (getattr(model.transformer, name), getattr(needed, name)) for name in names}
    pairs |= {
        "position_embedding_type": (model.position_embedding_type, "rope"),
        "rotary_percent": (model.rotary_percent, 1.0),
        "rotary_base": (model.rotary_base, int(architecture.rope_theta)),
        "use_rope_scaling": (model.rope_scaling, False),
        "share_embeddings_and_output_weights": (
            model.share_embeddings_and_output_weights,
            architecture.tied_embeddings,
        ),
    }
    for name, (given, expected) in pairs.items():
        if given != expected:
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise UserError(
                f"{flag}: the arguments make {name} {given!r}, expected {expected!r} for "
                f"{config.model.path} and this loss"
            )


def plan_by_count(
    lengths: IntArray, members: IntArray, *, data_parallel: int, count: int, size: int
) -> list[list[IntArray]]:
    """Spread a minibatch over ranks and Megatron's fixed number of micro-batches.

    Longest first to the micro-batch with the fewest tokens that has room: at most ``size``
    sequences each. The loss does not depend on it; memory and time do.

    Args:
        lengths: input tokens of every sequence of the rollout batch.
        members: the sequences of this minibatch, at most ``data_parallel * count * size``.
        count: micro-batches of a rank, ``get_num_microbatches()``.
        size: ``--micro-batch-size``.

    Returns:
        For each rank its micro-batches, each an array of sequence numbers, some perhaps empty.
    """
    bins: list[list[int]] = [[] for _ in range(data_parallel * count)]
    if len(members) > len(bins) * size:
        raise ValueError(
            f"{len(members)} sequences do not fit into {data_parallel} x {count} micro-batches of "
            f"at most {size}"
        )
    loads = np.zeros(len(bins), dtype=np.int64)
    full = np.iinfo(np.int64).max
    for member in members[np.argsort(-lengths[members], kind="stable")]:
        room = np.where([len(b) < size for b in bins], loads, full)
        fit = int(np.argmin(room))
        bins[fit].append(int(member))
        loads[fit] += int(lengths[member])
    arrays = [np.array(sorted(b), dtype=np.int64) for b in bins]
    return [arrays[rank * count : (rank + 1) * count] for rank in range(data_parallel)]


def make_forward_step(head: PolicyHead) -> Any:
    """Return the ``forward_step_func`` of ``pretrain()``, which reads a MinibatchIterator."""

    def step(data_iterator: MinibatchIterator, model: GPTModel) -> tuple[Tensor, Any]:
        return forward_step(
            data_iterator,
            model,
            head=head,
            records=data_iterator.records,
            losses=data_iterator.losses,
            report=report_sums,
        )

    return step


def report_sums(loss: Tensor, context: HeadContext) -> dict[str, Tensor]:
    """Return what Megatron logs: for each name the sum over a micro-batch's tokens, and its count.

    training.py:2540-2554 adds them up over micro-batches and data-parallel ranks and divides:
    means over the tokens of the whole minibatch. Float32 ``[2]`` each.
    """
    record, count = context.record, context.num_tokens
    assert record is not None and count is not None
    sums = {
        "policy loss": loss.detach(),
        "ppo kl": (record.behavior_log_prob - record.policy_log_prob).sum(),
        "clip fraction": (~record.keep).sum(),
        "divergence": record.divergence.sum(),
        "entropy": record.entropy.sum(),
    }
    return {name: torch.stack([total.float(), count.float()]) for name, total in sums.items()}


def chunk_iterators(
    micro_batches: Sequence[MicroBatch], chunks: int
) -> MinibatchIterator | list[MinibatchIterator]:
    """Return the data iterator of a step: one, or one for each of several model chunks.

    Every chunk reads every micro-batch; the last one's loss fills its iterator's records.
    """
    iterators = [MinibatchIterator(micro_batches) for _ in range(chunks)]
    return iterators if chunks > 1 else iterators[0]
