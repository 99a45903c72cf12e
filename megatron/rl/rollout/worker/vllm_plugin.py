# SPDX-License-Identifier: Apache-2.0
"""Tells vLLM where our weight receivers are; a module is loaded only when an engine asks for it.

An entry point of `vllm.general_plugins` (pyproject.toml), so that any vLLM server in the same
environment can be started with `--weight-transfer-config '{"backend": "pdm_shared_memory"}'`. Our
own engines call it from `worker_extension.py`, which needs no installed package.
"""

from ..transfer.weight_transport import CUDA_IPC_BACKEND, NCCL_BACKEND, SHARED_MEMORY_BACKEND

_RECEIVERS = {
    SHARED_MEMORY_BACKEND: ("megatron.rl.rollout.worker.weight_receiver", "SharedMemoryReceiver"),
    CUDA_IPC_BACKEND: ("megatron.rl.rollout.worker.gpu_receivers", "CudaIpcReceiver"),
    NCCL_BACKEND: ("megatron.rl.rollout.worker.gpu_receivers", "NcclReceiver"),
}


def register() -> None:
    """Register the backends; vLLM calls this once or more in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, (module, name) in _RECEIVERS.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)
