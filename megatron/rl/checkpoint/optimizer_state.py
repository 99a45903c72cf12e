# SPDX-License-Identifier: Apache-2.0
"""What Megatron's optimizers hold of each parameter on this rank, as flat tensors.

The distributed optimizer holds a range of the flattened parameter, the others all of it. Names
are Megatron's: ``param`` is the FP32 master, ``exp_avg`` and ``exp_avg_sq`` are Adam's moments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from megatron.rl.errors import UserError

MASTER = "param"


@dataclass(frozen=True)
class OptimizerSlice:
    """The state of elements ``[start, stop)`` of a flattened parameter.

    Attributes:
        parameter: the model's.
        tensors: by Megatron's names, each 1-D with ``stop - start`` elements. They share memory
            with the optimizer's, except with the precision-aware optimizer, which keeps another
            form of them.
        split: whether other data-parallel ranks hold the rest, or the same elements.
        owner: Megatron's optimizer of the parameter.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    tensors: dict[str, Tensor]
    split: bool
    owner: Any

    def write_back(self) -> None:
        """Give the optimizer the values of ``tensors``, where they are copies."""
        if self.owner.config.use_precision_aware_optimizer:
            self.owner._set_main_param_and_optimizer_states(self.parameter, self.tensors)


def check_optimizer(optimizer: Any) -> None:
    """Raise UserError for an optimizer whose state cannot be saved."""
    for part in _parts(optimizer):
        config = part.config
        if config.optimizer != "adam":
            raise UserError(
                f"megatron.optimizer.optimizer is {config.optimizer}, of which checkpoints cannot "
                "be written; set it to adam, or checkpoint.every to 0"
            )
        if config.optimizer_cpu_offload:
            raise UserError(
                "megatron.optimizer.optimizer_cpu_offload: checkpoints of an offloaded optimizer "
                "cannot be written; remove it, or set checkpoint.every to 0"
            )


def optimizer_slices(optimizer: Any) -> Iterator[OptimizerSlice]:
    """Yield what this rank holds of every parameter, always in the same order.

    State that does not exist before the first step is made first, as zeros.
    """
    for part in _parts(optimizer):
        _create_state(part)
        if isinstance(part, DistributedOptimizer):
            yield from _distributed_slices(part)
        else:
            yield from _whole_slices(part)


def is_distributed(optimizer: Any) -> bool:
    """Return whether data-parallel ranks share the optimizer's state among them."""
    return any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))


def optimizer_step(optimizer: Any) -> int:
    """Return the number of steps that Adam's bias correction counts on this rank, 0 at first."""
    steps = {
        int(holder["step"])
        for part in _parts(optimizer)
        for holder in (*part.optimizer.state.values(), *part.optimizer.param_groups)
        if "step" in holder
    }
    assert len(steps) <= 1, f"parameters have taken different numbers of steps: {steps}"
    return steps.pop() if steps else 0


def set_optimizer_step(optimizer: Any, step: int) -> None:
    """Undo :func:`optimizer_step`."""
    for part in _parts(optimizer):
        inner = part.optimizer
        if isinstance(inner, torch.optim.Adam):  # AdamW is one, too
            for state in inner.state.values():
                state["step"] = torch.tensor(float(step))
        else:  # Transformer Engine's and Apex's count in the groups
            for group in inner.param_groups:
                group["step"] = step


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers: one, or one for experts and one for the rest."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if getattr(part, "optimizer", None) is not None]


def _create_state(part: Any) -> None:
    step = optimizer_step(part)
    if any(not part.optimizer.state.get(param) for param in _parameters(part)):
        part.init_state_fn(part.optimizer, part.config)
        set_optimizer_step(part, step)


def _parameters(part: Any) -> Iterator[Tensor]:
    for group in part.optimizer.param_groups:
        yield from group["params"]


def _distributed_slices(part: DistributedOptimizer) -> Iterator[OptimizerSlice]:
    for buffer_ranges in part.gbuf_ranges:
        for buckets in buffer_ranges.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    here = ranges["param"]
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    yield OptimizerSlice(
                        parameter, here.start, here.end, _flat(tensors), True, part
                    )


def _whole_slices(part: Any) -> Iterator[OptimizerSlice]:
    for parameter, master in _masters(part):
        tensors = {MASTER: master, **part.optimizer.state[master]}
        yield OptimizerSlice(parameter, 0, parameter.numel(), _flat(tensors), False, part)


def _masters(part: Any) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Pairs of a model's parameter and what the optimizer updates in its place."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for models, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, masters, strict=True)
        for group in part.fp32_from_fp32_groups:
            yield from zip(group, group, strict=True)
    else:
        assert isinstance(part, FP32Optimizer), type(part)
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)


def _flat(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Adam's step is not a tensor of the parameter's size; it is saved once, as a number."""
    return {
        name: tensor.detach().view(-1)
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and name != "step"
    }
