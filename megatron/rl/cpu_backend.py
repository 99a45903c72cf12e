# SPDX-License-Identifier: Apache-2.0
"""Run megatron-core 0.19 on CPU with gloo: an explicit, complete list of what has to differ.

Megatron-Core names CUDA directly in a few dozen places. :func:`install` replaces those names, once,
for this process, and nothing else; each patch below states the Megatron lines that need it. A run
asks for it with ``run.device: cpu``. It is refused where CUDA is in use, because it would silently
move GPU tensors.

The layer modules that Megatron lacks on CPU (RMSNorm under sequence parallelism, attention over
packed sequences) are ordinary modules in ``megatron.rl.model.cpu_modules``; they are chosen by the
layer spec and patch nothing.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.rl.context_parallel import ContextShard, held_positions

_installed = False

# Factories that Megatron calls with a literal device="cuda": schedules.py:749, 1121, 2292
# (token count), optimizer.py:315, 690-702 (scale, found_inf), clip_grads.py:134, 180
# (overflow buffer), token_dispatcher.py:1054.
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "empty_like")

# Tensor.type() of a CPU tensor -> the name that Megatron's optimizers test for:
# distrib_optimizer.py:401, 466, 758; optimizer.py:1009, 1028; clip_grads.py:174.
_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


def is_installed() -> bool:
    """Return whether this process runs Megatron on CPU."""
    return _installed


def install() -> None:
    """Make megatron-core run on CPU in this process. Idempotent.

    Call it before anything else imports ``megatron.core``: Megatron decorates small functions
    with ``torch.compile`` at import (``megatron/core/jit.py``), which on CPU costs seconds of
    compilation a function and gains nothing at the sizes that fit there.

    Raises:
        RuntimeError: CUDA has already been initialised in this process.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "the CPU backend cannot be installed: CUDA is already in use in this process. "
            "Set run.device to cuda, or start the process with CUDA_VISIBLE_DEVICES empty."
        )
    _disable_compilation()
    _patch_devices()
    _patch_streams()
    _patch_rng()
    _patch_tensor_type()
    _patch_megatron()
    _installed = True


def _disable_compilation() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch._dynamo.config

    torch._dynamo.config.disable = True


def _on_cpu(device: Any) -> Any:
    """Map a CUDA device in any of its spellings to the CPU."""
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _patch_devices() -> None:
    # Nearly every Megatron allocation asks for device=torch.cuda.current_device():
    # mappings.py:95-447, layers.py:305-1403, param_and_grad_buffer.py:1162-1186,
    # router.py:98-247, p2p_communication.py:211-342, parallel_state.py:1033.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

    def rewriting(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None:
                kwargs["device"] = _on_cpu(kwargs["device"])
            return factory(*args, **kwargs)

        return on_cpu

    for name in _FACTORIES:
        setattr(torch, name, rewriting(getattr(torch, name)))

    # rope_utils.py:64, optimizer.py:586, 591, distrib_optimizer.py:1374, data.py:84.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


class _NoStream:
    """Stands for a CUDA stream or event: CPU work is ordered by the program itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_NoStream"]:
        # wait_stream, wait_event, record, record_event, synchronize: nothing to wait for.
        return lambda *args, **kwargs: self


@contextlib.contextmanager
def _no_stream_context(stream: Any = None) -> Iterator[None]:
    yield


def _patch_streams() -> None:
    # token_dispatcher.py:469, 922-946 (host copies), distributed_data_parallel.py:297,
    # param_and_grad_buffer.py:632, 686-691, 814 (overlapped reduction).
    current = _NoStream()
    torch.cuda.Stream = _NoStream  # type: ignore[assignment, misc]
    torch.cuda.Event = _NoStream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: current  # type: ignore[assignment, return-value]
    torch.cuda.stream = _no_stream_context  # type: ignore[assignment, misc]
    # p2p_communication.py:263, 419; parallel_state.py:1035; distributed_data_parallel.py:649.
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None


def _patch_rng() -> None:
    # CudaRNGStatesTracker (tensor_parallel/random.py:280-345) keeps one state per kind of
    # parallelism and swaps the device generator; on CPU the device generator is the default one.
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    megatron_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: (
        torch.set_rng_state(new_state)
    )


def _patch_tensor_type() -> None:
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_as_on_gpu(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return _CUDA_TYPE_NAMES.get(name, name)

    torch.Tensor.type = type_as_on_gpu  # type: ignore[method-assign, assignment]


def _patch_megatron() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import token_dispatcher

    # token_dispatcher.py:930-939 converts split sizes to numpy only if they sit on a GPU
    # (moe_utils.py:1184); gloo's all_to_all_single takes lists of int, not tensors.
    move = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(move)
    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=False)

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu

    # rope_utils.py:247-262 rotates one sequence at a time and chains as many in-place copies
    # through autograd: quadratic in the number of sequences. GPU runs fuse it
    # (apply_rope_fusion); here all tokens are rotated at once by their position.
    @functools.wraps(rope_utils._apply_rotary_pos_emb_thd)
    def rotate_packed(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        *,
        cp_group: torch.distributed.ProcessGroup,
        **kwargs: Any,
    ) -> torch.Tensor:
        held = held_positions(cu_seqlens, ContextShard(cp_group.rank(), cp_group.size()))
        lengths = cu_seqlens.diff()
        starts = torch.repeat_interleave(
            cu_seqlens[:-1], lengths // cp_group.size(), output_size=t.size(0)
        )
        freqs = freqs[held - starts]
        rotated = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, **kwargs)
        return rotated.squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
