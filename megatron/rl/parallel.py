# SPDX-License-Identifier: Apache-2.0
"""How a model is laid out over ranks: the settings, their check, and the process groups."""

import os
from dataclasses import dataclass
from datetime import timedelta

from megatron.rl.context_parallel import ContextShard
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture

# Rows of the embedding and the head are padded to a multiple of this times TP
# (Megatron's own default, so that its checkpoints fit).
VOCAB_DIVISIBLE_BY = 128


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one rank: those of one chunk, global numbers ``[first, first+count)``.

    ``stage`` is the pipeline stage, ``chunk`` the virtual stage within it (0 without them).
    """

    stage: int
    chunk: int
    first: int
    count: int


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel layout. The number of ranks is ``tensor * pipeline * context * data``.

    Attributes:
        tensor: tensor-parallel size TP.
        pipeline: pipeline-parallel size PP.
        context: context-parallel size CP.
        data: data-parallel size DP.
        expert: expert-parallel size EP; experts are spread over TP x CP x DP ranks, each expert
            whole on one rank.
        sequence: sequence parallelism; None turns it on exactly when ``tensor > 1``.
        virtual: virtual pipeline size: each stage holds so many separate runs of layers, and
            Megatron's interleaved schedule shortens the pipeline's idle time; None for one run.
        first_stage_layers, last_stage_layers: layers of the first and the last pipeline stage,
            which also have the embedding and the head; None for an equal share.
        timeout_s: ranks that wait longer for another one while training end the run.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    sequence: bool | None = None
    virtual: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    timeout_s: int = 600

    @property
    def timeout(self) -> timedelta:
        """``timeout_s``, as torch takes it."""
        return timedelta(seconds=self.timeout_s)

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def micro_batch_multiple(self) -> int:
        """The interleaved schedule takes micro-batches in groups of one per pipeline stage."""
        return self.pipeline if self.virtual is not None else 1

    def padded_vocab_size(self, vocab_size: int) -> int:
        """The number of rows of the whole embedding: a multiple of 128 x TP."""
        multiple = VOCAB_DIVISIBLE_BY * self.tensor
        return -(-vocab_size // multiple) * multiple

    def layer_runs(self, num_layers: int) -> list[LayerRun]:
        """Which stage and chunk has which of the model's layers, in the order of the layers."""
        ends = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        given = {stage: size for stage, size in ends.items() if size is not None}
        others = self.pipeline - len(given)
        share = (num_layers - sum(given.values())) // others if others else 0
        chunks = self.virtual or 1
        runs, first = [], 0
        for chunk in range(chunks):
            for stage in range(self.pipeline):
                count = given.get(stage, share) // chunks
                runs.append(LayerRun(stage, chunk, first, count))
                first += count
        return runs

    # Megatron numbers ranks in the order tensor, context, (expert,) data, pipeline, the fastest
    # first (parallel_state.RankGenerator, order "tp-cp-ep-dp-pp"). An expert is whole on its ranks
    # (expert tensor parallelism 1), which divide a stage's ranks anew.

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    def stage_ranks(self, stage: int) -> range:
        """The ranks of a pipeline stage."""
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    def tensor_ranks(self, stage: int, tensor_rank: int) -> range:
        """The ranks of a stage that hold the same tensor-parallel shard."""
        return self.stage_ranks(stage)[tensor_rank :: self.tensor]

    def expert_ranks(self, stage: int, expert_rank: int) -> range:
        """The ranks of a stage that hold the same experts."""
        return self.stage_ranks(stage)[expert_rank :: self.expert]

    def check(self, model: Architecture) -> None:
        """Raise UserError, naming setting and numbers, when the model cannot be laid out so."""
        for name in ("tensor", "pipeline", "context", "data", "expert", "timeout_s"):
            if getattr(self, name) < 1:
                raise UserError(f"parallel.{name} is {getattr(self, name)}, expected at least 1")
        _must_divide("parallel.tensor", self.tensor, "attention heads", model.num_heads)
        self._check_groups(model)
        self._check_stages(model.num_layers)
        if model.is_moe:
            _must_divide("parallel.expert", self.expert, "experts", model.num_experts)
            ranks = self.tensor * self.context * self.data
            _must_divide("parallel.expert", self.expert, "ranks of a pipeline stage", ranks)
            if self.tensor > 1 and not self.sequence_parallel:
                raise UserError(
                    "parallel.sequence is false with parallel.tensor "
                    f"{self.tensor}: Megatron trains experts under tensor parallelism only with "
                    "sequence parallelism; set parallel.sequence to true"
                )
        else:
            _must_divide("parallel.tensor", self.tensor, "FFN columns", model.ffn_hidden_size)
            if self.expert > 1:
                raise UserError(
                    f"parallel.expert is {self.expert}, but the model has no experts; set it to 1"
                )
        if self.sequence_parallel and self.tensor == 1:
            raise UserError("parallel.sequence is true, which needs parallel.tensor > 1")

    def _check_groups(self, model: Architecture) -> None:
        """Check that ranks have whole key-value heads, or that each of these has whole ranks."""
        if model.num_groups % self.tensor and self.tensor % model.num_groups:
            raise UserError(
                f"parallel.tensor is {self.tensor}, expected a divisor or a multiple of the "
                f"model's {model.num_groups} key-value heads"
            )
        rows = (model.num_heads + 2 * model.num_groups) * model.head_dim
        _must_divide("parallel.tensor", self.tensor, "rows of q, k and v", rows)

    def _check_stages(self, num_layers: int) -> None:
        """Check that the layers divide over pipeline stages and their virtual ones."""
        ends = {
            f"parallel.{name}": size
            for name in ("first_stage_layers", "last_stage_layers")
            if (size := getattr(self, name)) is not None
        }
        for name, size in ends.items():
            if size < 1:
                raise UserError(f"{name} is {size}, expected at least 1")
            if self.pipeline == 1:
                raise UserError(f"{name} is {size}, which needs parallel.pipeline > 1")
        rest, stages = num_layers - sum(ends.values()), self.pipeline - len(ends)
        if not ends:
            _must_divide("parallel.pipeline", self.pipeline, "layers", num_layers)
        elif rest % stages if stages else rest:
            raise UserError(
                f"{' and '.join(f'{name} {size}' for name, size in ends.items())} leave {rest} of "
                f"the model's {num_layers} layers, which do not divide over {stages} other stages"
            )
        elif stages and rest < stages:
            raise UserError(
                f"{' and '.join(f'{name} {size}' for name, size in ends.items())} leave {rest} of "
                f"the model's {num_layers} layers, too few for {stages} other stages"
            )
        if self.virtual is None:
            return
        if self.virtual < 2:
            raise UserError(f"parallel.virtual is {self.virtual}, expected null or at least 2")
        if self.pipeline == 1:
            raise UserError(
                f"parallel.virtual is {self.virtual}, which needs parallel.pipeline > 1"
            )
        for layers in {*ends.values(), *([rest // stages] if stages else [])}:
            if layers % self.virtual:
                raise UserError(
                    f"parallel.virtual is {self.virtual}, which does not divide the {layers} "
                    f"layers of a pipeline stage ({num_layers} over parallel.pipeline "
                    f"{self.pipeline})"
                )


def _must_divide(setting: str, size: int, what: str, count: int) -> None:
    if count % size:
        raise UserError(f"{setting} is {size}, which does not divide the model's {count} {what}")


def join_ranks(layout: ParallelConfig, backend: str) -> None:
    """Join the process group that the environment names.

    Reads ``RANK``, ``WORLD_SIZE`` and either ``PDM_RL_STORE`` (a file, single node) or
    ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

    Raises:
        UserError: the number of ranks that were started is not the layout's.
    """
    import torch

    from megatron.rl.fresh_store import fresh_store

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != layout.world_size:
        raise UserError(
            f"{world_size} ranks were started, but parallel.tensor x pipeline x context x data is "
            f"{layout.tensor} x {layout.pipeline} x {layout.context} x {layout.data} = "
            f"{layout.world_size}"
        )
    store_file = os.environ.get("PDM_RL_STORE")
    if store_file:
        store: torch.distributed.Store = torch.distributed.FileStore(store_file, world_size)
    else:
        found = torch.distributed.rendezvous("env://", rank, world_size, timeout=layout.timeout)
        store = fresh_store(next(found)[0], rank, world_size, layout.timeout)
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=layout.timeout
    )


def build_groups(layout: ParallelConfig, seed: int) -> None:
    """Build Megatron's groups over the ranks that have joined, and seed its generators."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=-(-layout.timeout_s // 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def context_shard() -> ContextShard:
    """Return this rank's place in the context-parallel group, which must exist."""
    from megatron.core import parallel_state

    return ContextShard(
        parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    )


def leave_ranks() -> None:
    """Leave Megatron's groups and the process group; safe to call twice."""
    import torch
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
