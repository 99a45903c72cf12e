# SPDX-License-Identifier: Apache-2.0
"""Meeting a vLLM server: what a run needs of it, and whether it answers and fits."""

import shlex
import time
from dataclasses import dataclass
from typing import Literal

from ..checkpoint_index import CheckpointIndex
from ..client.engine_config import EXTENSION_CLASS
from ..errors import EngineConfigError, EngineDied, EngineStartError, EngineTimeout
from ..transfer.weight_transport import (
    NCCL_BACKEND,
    SHARED_MEMORY_BACKEND,
    WeightTransport,
    make_transport,
)
from .client import CONNECT_TIMEOUT_S, ServerClient, ServerStatusError
from .info import PATH as INFO_PATH
from .info import VLLM_NCCL_BACKEND, ServerInfo, check_server, read_server_info
from .response import GENERATE_PATH, wanted_logprobs
from .url import ServerAddress

CONTROL_TIMEOUT_S = 60.0
_POLL_S = 0.5


@dataclass(frozen=True)
class VLLMServerConfig:
    """Where a server is, and what a run needs of it.

    url, token_variable, allow_remote   see RolloutConfig.server_url and its neighbours
    model_path       the run's own model folder; the server has to serve the same model
    max_model_len    longest prompt + response, in tokens
    max_num_seqs     requests that are open at once
    top_logprobs     the largest K that a request may ask for
    transport        "auto": what the server was started with; or "shared_memory", "nccl"
    quantization, scales, bucket_mib, digests   as in VLLMEngineConfig
    sleep            the server must be able to sleep
    start_timeout_s  until the server answers
    stall_timeout_s  longest silence: of a control route, or of sampling as a whole
    """

    url: str
    model_path: str
    max_model_len: int
    token_variable: str | None = None
    allow_remote: bool = False
    max_num_seqs: int = 64
    top_logprobs: int = 20
    transport: str = "auto"
    quantization: Literal["none", "block_fp8"] = "none"
    scales: Literal["power_of_two", "float32"] = "power_of_two"
    bucket_mib: int = 256
    digests: bool = True
    sleep: bool = False
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.transport == "cuda_ipc":
            raise EngineConfigError(
                "bridge.transport cuda_ipc is not for servers: vLLM's HTTP route takes CUDA IPC "
                "handles as pickles, which run as code. Use shared_memory or nccl, or "
                "rollout.engine vllm"
            )


def server_arguments(config: VLLMServerConfig, index: CheckpointIndex) -> list[str]:
    """The command line of a server that fits, after ``python -m`` and with VLLM_SERVER_DEV_MODE=1.

    Host, port, dtype, parallelism and memory are the user's.
    """
    backend = NCCL_BACKEND if config.transport == "nccl" else SHARED_MEMORY_BACKEND
    return [
        "vllm.entrypoints.openai.api_server",
        "--model", config.model_path,
        "--enable-scale-out",
        "--skip-tokenizer-init",
        "--generation-config", "vllm",
        "--logprobs-mode", "processed_logprobs",
        "--max-logprobs", str(wanted_logprobs(config.top_logprobs, index.vocab_size)),
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs),
        "--worker-extension-cls", EXTENSION_CLASS,
        *_backend_arguments(backend),
    ]  # fmt: skip


def meet_server(
    client: ServerClient, address: ServerAddress, config: VLLMServerConfig, index: CheckpointIndex
) -> ServerInfo:
    """Wait until the server answers, and check that a run can train on what it samples.

    Raises EngineStartError when it does not answer, EngineConfigError when it does not fit.
    """
    _await_health(client, address, config.start_timeout_s)
    advice = _advice(config, index)
    try:
        client.get("/v1/models", CONTROL_TIMEOUT_S)  # a guarded route: tells a wrong token
        version = str(client.get("/version", CONTROL_TIMEOUT_S)["version"])
        size = int(client.get("/get_world_size", CONTROL_TIMEOUT_S)["world_size"])
        answer = client.get(INFO_PATH, CONTROL_TIMEOUT_S, config_format="json")
        # One token by the route that sampling takes.
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        client.post(GENERATE_PATH, body, CONTROL_TIMEOUT_S)
    except (ServerStatusError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, EngineConfigError):
            raise
        raise EngineConfigError(
            f"the server at {address} lacks what a run needs ({error}). {advice}"
        ) from None
    info = read_server_info(answer, version, size, EXTENSION_CLASS)
    check_server(info, index, config.top_logprobs, config.max_model_len, advice)
    if config.sleep and not info.sleep_mode:
        raise EngineConfigError(
            f"rollout.sleep is set, and the server at {address} cannot sleep: start it with "
            "--enable-sleep-mode (CUDA only), or set rollout.sleep to false"
        )
    return info


def choose_transport(
    info: ServerInfo, address: ServerAddress, config: VLLMServerConfig, index: CheckpointIndex
) -> WeightTransport:
    """The transport that fits the server's backend, unless another one is asked for."""
    backends = {
        SHARED_MEMORY_BACKEND: "shared_memory",
        NCCL_BACKEND: "nccl",
        VLLM_NCCL_BACKEND: "nccl",
    }
    kind = backends.get(info.transfer_backend or "")
    if kind is None or config.transport not in ("auto", kind):
        wanted = config.transport if config.transport != "auto" else " or ".join(backends)
        raise EngineConfigError(
            f"the server takes weights by {info.transfer_backend!r}, expected {wanted!r}. "
            f"{_advice(config, index)}"
        )
    if kind == "shared_memory" and not address.loopback:
        raise EngineConfigError(
            f"the server at {address} takes weights from shared memory, which only works on one "
            f"machine: start it with {shlex.join(_backend_arguments(NCCL_BACKEND))}"
        )
    if kind == "nccl" and not _has_cuda():
        raise EngineConfigError(
            f"the server takes weights by {info.transfer_backend!r}, and this trainer has no GPU "
            f"to send from: start it with {shlex.join(_backend_arguments(SHARED_MEMORY_BACKEND))}"
        )
    return make_transport(kind, bucket_bytes=config.bucket_mib << 20, num_receivers=info.world_size)


def _await_health(client: ServerClient, address: ServerAddress, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.get_bytes("/health", CONNECT_TIMEOUT_S)
            return
        except (EngineDied, EngineTimeout, ServerStatusError) as error:
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"no vLLM server answers at {address} after {timeout_s:.0f} s ({error}): "
                    "start one, or set rollout.server_url"
                ) from None
        time.sleep(_POLL_S)


def _backend_arguments(backend: str) -> list[str]:
    return ["--weight-transfer-config", f'{{"backend":"{backend}"}}']


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _advice(config: VLLMServerConfig, index: CheckpointIndex) -> str:
    command = shlex.join(server_arguments(config, index))
    return f"Start it with: VLLM_SERVER_DEV_MODE=1 python -m {command}"
