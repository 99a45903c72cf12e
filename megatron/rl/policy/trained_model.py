# SPDX-License-Identifier: Apache-2.0
"""What sampling and the weight bridge need of a model in training, whichever loop trains it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.rl import cpu_backend
from megatron.rl.batch import MicroBatch
from megatron.rl.model.architecture import Architecture
from megatron.rl.model.build import parameter_naming
from megatron.rl.model.fp8 import input_multiple
from megatron.rl.parallel import ParallelConfig
from megatron.rl.policy.head import PolicyHead, TokenRecord
from megatron.rl.policy.offload import TrainingMemory
from megatron.rl.policy.step import forward_backward
from megatron.rl.weights.gather import BUCKET_BYTES, Allocate, gather_hf_tensors
from megatron.rl.weights.plan import plan_weights


def training_device() -> torch.device:
    """Where this process trains."""
    return torch.device("cpu" if cpu_backend.is_installed() else "cuda")


class TrainedModel:
    """This rank's part of a model and of its optimizer.

    All methods are collective: every rank calls them in the same order.

    Args:
        chunks: this rank's part of the model, each wrapped in DistributedDataParallel.
        optimizer: Megatron's, of these chunks.

    Attributes:
        input_multiple: what the tokens of a micro-batch have to be a multiple of.
    """

    def __init__(
        self,
        architecture: Architecture,
        layout: ParallelConfig,
        head: PolicyHead,
        chunks: Sequence[DistributedDataParallel],
        optimizer: Any,
    ) -> None:
        self.architecture = architecture
        self.layout = layout
        self.head = head
        self.device = training_device()
        self.plan = plan_weights(architecture, layout, parameter_naming())
        self.chunks = list(chunks)
        self.input_multiple = input_multiple(layout, self.chunks[0].config)
        self.optimizer = optimizer
        self._training_memory = TrainingMemory(self.chunks, optimizer)

    def offload(self) -> None:
        """Give up the memory of gradients and optimizer until the next step or `restore`."""
        self._training_memory.release()

    def restore(self) -> None:
        """Take back what `offload` gave up."""
        self._training_memory.restore()

    def score(
        self, micro_batches: Sequence[MicroBatch], head: PolicyHead | None = None
    ) -> list[TokenRecord]:
        """Return what a head, by default the policy's, sees of these tokens; nothing is trained.

        One record a micro-batch on the last pipeline stage, an empty list elsewhere.
        """
        head = head or self.head
        self._finish_parameter_gather()
        with torch.no_grad():
            return forward_backward(self.chunks, head, micro_batches, forward_only=True)

    def hf_tensors(
        self,
        *,
        destinations: Sequence[int] = (0,),
        ranks_per_node: int | None = None,
        allocate: Allocate | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names on the destinations.

        See :func:`megatron.rl.weights.gather.gather_hf_tensors`.
        """
        self._finish_parameter_gather()
        return gather_hf_tensors(
            unwrap_model(self.chunks),
            self.plan,
            destinations=destinations,
            ranks_per_node=ranks_per_node,
            allocate=allocate,
            bucket_bytes=bucket_bytes,
        )

    def _finish_parameter_gather(self) -> None:
        """Bring the last step's weights to every rank.

        With ``overlap_param_gather`` the distributed optimizer leaves that to the next training
        step's forward pass: until then a rank has the new values of its own shard only.
        """
        late = [chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]
        if late:
            self.optimizer.prepare_model_params_for_param_sync()
        for chunk in late:
            chunk.start_param_sync(force_sync=True)
