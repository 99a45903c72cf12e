# SPDX-License-Identifier: Apache-2.0
"""What the trainer gives up while the engine samples on the same GPUs, and gets back.

Megatron's own functions do the moving: gradient buffers are freed (they are rebuilt as zeros, and a
step starts from zeros), the optimizer's tensors go to host memory. The weights stay: they are what
the engine is updated from.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor


class TrainingMemory:
    """The gradients and the optimizer of one rank, on the device or not."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._released = False
        self._on_host: list[tuple[dict[str, Any], str, Tensor]] = []

    def release(self) -> None:
        """Free the gradients and move the optimizer's tensors to host memory. Safe to call twice.

        Megatron 0.19 moves every parameter that the optimizer holds by assigning to its ``data``.
        Where such a parameter is a view of a weight (float32 weights, or the precision-aware
        optimizer), that cuts it off from the weight, and with the precision-aware optimizer no
        later step would reach the model. Views cost no memory of their own: they are put back.
        """
        if self._released:
            return
        for chunk in self._chunks:
            chunk.offload_grad_buffers()
        if not self._lives_on_host():
            views = [(param, param.data) for param in weight_views(self._chunks, self._optimizer)]
            self._on_host = list(_host_states(self._optimizer))
            self._optimizer.offload_to_cpu()
            for param, view in views:
                param.data = view
        self._released = True

    def restore(self) -> None:
        """Undo :meth:`release`; gradients are zero afterwards. Safe to call twice."""
        if not self._released:
            return
        for chunk in self._chunks:
            chunk.restore_grad_buffers()
        if not self._lives_on_host():
            self._optimizer.restore_from_cpu()
            # Megatron moves the step counters too, which torch's Adam keeps on the host.
            for state, name, value in self._on_host:
                state[name] = value
            self._on_host = []
        self._released = False

    def _lives_on_host(self) -> bool:
        """With ``optimizer_cpu_offload`` the state is on the host at all times; Megatron's restore
        would move all of it to the device."""
        return bool(self._optimizer.config.optimizer_cpu_offload)


def weight_views(chunks: Sequence[DistributedDataParallel], optimizer: Any) -> Iterator[Tensor]:
    """The optimizer's parameters that lie in the memory of the model's weights."""
    weights = {
        param.untyped_storage().data_ptr() for chunk in chunks for param in chunk.parameters()
    }
    for inner in _inner_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                if isinstance(param, Tensor) and param.untyped_storage().data_ptr() in weights:
                    yield param


def _host_states(optimizer: Any) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """State that lies on the host before anything is moved there: (state, key, tensor)."""
    for inner in _inner_optimizers(optimizer):
        for state in inner.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and not value.is_cuda:
                    yield state, name, value


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside Megatron's, which may be a chain of several."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "optimizer", None) is not None:
            yield part.optimizer
