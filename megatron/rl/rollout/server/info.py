# SPDX-License-Identifier: Apache-2.0
"""What a vLLM server says about itself, and whether a run can train on what it samples."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint_index import CheckpointIndex, read_checkpoint_index
from ..errors import EngineConfigError
from .response import wanted_logprobs

# The weight-transfer backend of vLLM's own that a server may have.
VLLM_NCCL_BACKEND = "nccl"
VERSION = "0.32"
PATH = "/server_info"


@dataclass(frozen=True)
class ServerInfo:
    """Settings of a running server, from its ``/server_info``.

    Attributes:
        model: the model folder or name that it was started with, and its ``served_name``.
        max_logprobs: log-probs that a request may ask for; -1 is no limit.
        transfer_backend: how it takes weights; None where it does not.
        has_extension: it was started with our worker extension, and can compute digests.
        world_size: workers that take part in an update.
    """

    vllm_version: str
    model: str
    served_name: str
    dtype: str
    quantization: str | None
    max_model_len: int
    max_logprobs: int
    logprobs_mode: str
    changes_logits: bool
    transfer_backend: str | None
    has_extension: bool
    sleep_mode: bool
    world_size: int


def read_server_info(answer: Any, version: str, world_size: int, extension: str) -> ServerInfo:
    """Read the JSON of ``/server_info?config_format=json``."""
    try:
        config = answer["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        transfer: Mapping[str, Any] = config["weight_transfer_config"] or {}
        served = model["served_model_name"]
        return ServerInfo(
            vllm_version=version,
            model=str(model["model"]),
            served_name=str(served[0] if isinstance(served, list) else served),
            dtype=str(model["dtype"]).removeprefix("torch."),
            quantization=model["quantization"],
            max_model_len=int(model["max_model_len"]),
            max_logprobs=int(model["max_logprobs"]),
            logprobs_mode=str(model["logprobs_mode"]),
            changes_logits=bool(model["logits_processors"]),
            transfer_backend=transfer.get("backend"),
            has_extension=parallel.get("worker_extension_cls") == extension,
            sleep_mode=bool(model["enable_sleep_mode"]),
            world_size=world_size,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineConfigError(
            f"{PATH} of the server is not that of vLLM {VERSION} ({error!r}); it says to be vLLM "
            f"{version}"
        ) from None


def check_server(
    info: ServerInfo, index: CheckpointIndex, top_logprobs: int, max_model_len: int, advice: str
) -> None:
    """Raise EngineConfigError where rollouts of this server cannot be trained on.

    Args:
        index: of the run's own model folder.
        advice: how to start a server that fits; ends every message.
    """
    wanted = wanted_logprobs(top_logprobs, index.vocab_size)
    problems = []
    if info.logprobs_mode != "processed_logprobs":
        problems.append(
            f"its log-probs are {info.logprobs_mode}, not those of what it samples from"
        )
    if 0 <= info.max_logprobs < wanted:
        problems.append(
            f"it gives at most {info.max_logprobs} log-probs a token, and the top {top_logprobs} "
            f"take {wanted} (it counts the sampled token among them)"
        )
    if info.max_model_len < max_model_len:
        problems.append(
            f"its context of {info.max_model_len} tokens is shorter than prompt and response, "
            f"{max_model_len}"
        )
    if info.changes_logits:
        problems.append("its logits processors change the distribution behind the trainer's back")
    if info.transfer_backend is None:
        problems.append("it was started without a weight-transfer backend and takes no weights")
    problems += _model_problems(info, index)
    if problems:
        raise EngineConfigError(f"this server cannot be used: {'; '.join(problems)}. {advice}")


def serves_own_folder(info: ServerInfo, model_path: str) -> bool:
    """Whether the server was started from the run's own model folder."""
    return os.path.realpath(info.model) == os.path.realpath(model_path)


def _model_problems(info: ServerInfo, index: CheckpointIndex) -> list[str]:
    """How the server's model differs from the run's, as far as its folder can be seen from here.

    On another machine the weights' names and shapes, and the certificate, have to tell.
    """
    if not os.path.isdir(info.model):
        return []
    theirs = read_checkpoint_index(info.model)
    if theirs.vocab_size != index.vocab_size:
        return [
            f"its model {info.model} has a vocabulary of {theirs.vocab_size} tokens, the run's has "
            f"{index.vocab_size}"
        ]
    shapes = {name: tensor.shape for name, tensor in theirs.tensors.items()}
    ours = {name: tensor.shape for name, tensor in index.tensors.items()}
    differing = sorted(
        name for name in shapes.keys() | ours.keys() if shapes.get(name) != ours.get(name)
    )
    if differing:
        return [f"its model {info.model} is another one: {differing[0]} differs in shape"]
    return []
