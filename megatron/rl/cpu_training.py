# SPDX-License-Identifier: Apache-2.0
"""Run ``megatron.training`` 0.19 on CPU with gloo: what its ``pretrain()`` needs beyond the core.

:func:`install` adds to :mod:`megatron.rl.cpu_backend`, whose patches of ``megatron.core`` and
``torch.cuda`` already carry most of the stock training loop. Each patch here states the Megatron
lines that need it. What is left needs a GPU; :func:`refuse_cuda_only` names it before Megatron
meets it with a stack trace.
"""

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.rl import cpu_backend
from megatron.rl.errors import UserError

_installed = False

# Defaults of Megatron's flags that need CUDA, Transformer Engine or Apex -> what a CPU run takes.
# The three fusions of Megatron's own are torch.compile'd or CUDA kernels; the rest are imports.
_CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
}

# Megatron's argument -> its value without the feature, and the line that calls CUDA for it.
CUDA_ONLY: dict[str, tuple[Any, str]] = {
    "transformer_impl": ("local", "transformer_engine.py:70 imports it, and it needs CUDA"),
    "moe_grouped_gemm": (False, "arguments.py:1339 asks for the compute capability"),
    "fp8": (None, "fp8_utils.py:42 has it from Transformer Engine only"),
    "fp4": (None, "fp4_utils.py:31 has it from Transformer Engine only"),
    "cuda_graph_impl": ("none", "cuda_graphs.py:1187 records a CUDA graph"),
    "optimizer_cuda_graph": (False, "optimizer_cuda_graph.py:35 records a CUDA graph"),
    "log_memory_to_tensorboard": (False, "training.py:2744 reads torch.cuda.memory_stats()"),
    "record_memory_history": (False, "training.py:2818 reads torch.cuda.memory._snapshot()"),
    "log_device_memory_used": (False, "common_utils.py:327 asks the driver"),
    "log_straggler": (False, "utils.py:1600 times CUDA events"),
    "log_energy": (False, "energy_monitor.py:40 reads the GPU through NVML"),
    "gpu_sniff_test_interval": (None, "gpu_sniff_test.py:59 times kernels"),
    "use_torch_fsdp2": (False, "torch_fully_sharded_data_parallel.py:81 makes a mesh of GPUs"),
    "use_megatron_fsdp": (False, "mcore_fsdp_adapter.py:156 shards on the GPU"),
    "optimizer_cpu_offload": (False, "hybrid_optimizer.py:120 copies on CUDA streams"),
}

# Where the argument is not called as its flag.
_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}

# Blackwell: the newest of which arguments.py asks nothing special (see _patch_arguments).
_NO_CONNECTION_LIMIT = 10


def install() -> None:
    """Make ``megatron.training`` run on CPU in this process. Idempotent.

    Call it before anything else imports Megatron.
    """
    global _installed
    cpu_backend.install()
    if _installed:
        return
    _patch_arguments()
    _patch_initialize()
    _patch_optimizer_checkpoint()
    _installed = True


def is_installed() -> bool:
    """Return whether this process runs ``megatron.training`` on CPU."""
    return _installed


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Give Megatron's flags the defaults of a CPU run; what a user types still counts."""
    parser.set_defaults(**_CPU_DEFAULTS)


def flag_of(argument: str) -> str:
    """Return the flag of one of Megatron's arguments in `CUDA_ONLY`."""
    return _FLAGS.get(argument, f"--{argument.replace('_', '-')}")


def refuse_cuda_only(args: argparse.Namespace) -> None:
    """Refuse, once arguments are parsed, what Megatron cannot do without CUDA.

    Raises:
        UserError: names the flag and Megatron's line.
    """
    for name, (off, reason) in CUDA_ONLY.items():
        value = getattr(args, name, off)
        if value != off:
            raise UserError(
                f"{flag_of(name)} is {value!r}, expected {off!r} on CPU: {reason}. "
                "Leave it out, or run on GPUs (--pdm-device cuda)"
            )
    if args.profile and not args.use_pytorch_profiler:
        raise UserError(
            "--profile starts the CUDA profiler (training.py:3735); on CPU add "
            "--use-pytorch-profiler"
        )


def _patch_arguments() -> None:
    from megatron.training import arguments

    # arguments.py:1414 asks the GPU for its architecture, to demand CUDA_DEVICE_MAX_CONNECTIONS=1
    # of those before Blackwell. A CPU has no such queues, and no architecture to ask for
    # (common_utils.py:504).
    arguments.get_device_arch_version = lambda: _NO_CONNECTION_LIMIT


def _patch_initialize() -> None:
    from megatron.training import training

    # training.py:1091 does not pass on initialize_megatron's allow_no_cuda (initialize.py:66).
    initialize = training.initialize_megatron

    @functools.wraps(initialize)
    def initialize_on_cpu(**settings: Any) -> Any:
        with _one_device():
            return initialize(**settings, allow_no_cuda=True)

    training.initialize_megatron = initialize_on_cpu
    # training.py:1117 compiles three fused functions for the GPU by running them there
    # (initialize.py:508-558). Here they run uncompiled.
    training.set_jit_fusion_options = lambda tp_size=None: None


@contextmanager
def _one_device() -> Iterator[None]:
    """Count one CUDA device while Megatron initialises, and select none.

    initialize.py:358 builds the parallel groups, and 447 seeds the generators of tensor
    parallelism, only where devices are counted; 282 selects one. It is for the time of these calls
    only: the rest of PyTorch has to see that there is none.
    """
    counted, select = torch.cuda.device_count, torch.cuda.set_device
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.device_count, torch.cuda.set_device = counted, select


def _patch_optimizer_checkpoint() -> None:
    """Let the distributed optimizer resume with PyTorch's Adam.

    GPU runs have Transformer Engine's or Apex's, which keep the step in the parameter group, and
    create their state before the first step. With PyTorch's, a resumed run fails three times, and
    would then be silently wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    # distrib_optimizer.py:838 wants one step of the whole state, which is empty until the first.
    describe = Optimizer.sharded_state_dict

    @functools.wraps(describe)
    def describe_fresh(
        self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if is_loading and not self.optimizer.state:
            _create_adam_state(self.optimizer)
        return describe(self, model_state, is_loading, *args, **kwargs)

    # distrib_optimizer.py:1225 writes into a float32 parameter, a view of a leaf with a gradient;
    # 1222 expects the step, a tensor of PyTorch's state, among the tensors of the checkpoint.
    set_state = Optimizer._set_main_param_and_optimizer_states

    @functools.wraps(set_state)
    @torch.no_grad()
    def set_state_but_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        set_state(self, parameter, {**tensors, "step": None})

    # distrib_optimizer.py:1028-1032 gives every parameter the same step tensor, which Adam then
    # increments once a parameter: its bias correction would be that of many steps later.
    load = Optimizer.load_state_dict

    @functools.wraps(load)
    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        step = float(state_dict["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    Optimizer.sharded_state_dict = describe_fresh
    Optimizer._set_main_param_and_optimizer_states = set_state_but_step
    Optimizer.load_state_dict = load_with_own_steps


def _create_adam_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
