# SPDX-License-Identifier: Apache-2.0
"""The rollout engines that a run's config asks for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from megatron.rl.config import Config
from megatron.rl.rank_places import describe_ranks
from megatron.rl.rollout.client.engine_config import PARALLEL_ARGUMENTS, VLLMEngineConfig
from megatron.rl.rollout.client.engine_python import engine_python
from megatron.rl.rollout.client.vllm_engine import VLLMEngine
from megatron.rl.rollout.protocol import RolloutEngine
from megatron.rl.rollout.replay_engine import ReplayEngine
from megatron.rl.rollout.server.engine import VLLMServerConfig, VLLMServerEngine
from megatron.rl.rollout.topology import EnginePlace, NodeDevices, Topology, plan_topology


def run_topology(config: Config) -> Topology:
    """Return where the engines of this run are; the environment says how many ranks a node has.

    Raises:
        UserError: ranks, engines, prompts and GPUs do not fit each other.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.world_size))
    on_gpus = config.run.device == "cuda" and config.rollout.engine == "vllm"
    topology = plan_topology(
        config.parallel,
        ranks_per_node=ranks,
        engines_per_node=config.rollout.engines_per_node,
        seed=config.run.seed,
        devices=_node_devices(config, ranks) if on_gpus else None,
        single=config.rollout.engine == "vllm_server",
    )
    topology.split(config.rollout.prompts, "rollout.prompts")
    topology.split(config.eval.prompts, "eval.prompts")
    return topology


def describe_processes(config: Config) -> str:
    """Return who is started and which rank owns which engine, as lines of comment."""
    layout, rollout = config.parallel, config.rollout
    topology = run_topology(config)
    shares = topology.split(rollout.prompts, "rollout.prompts")
    lines = [
        f"# {layout.world_size} trainer ranks on {config.run.device}: tensor {layout.tensor} x "
        f"pipeline {layout.pipeline} x context {layout.context} x data {layout.data}, expert "
        f"{layout.expert}, sequence parallelism {'on' if layout.sequence_parallel else 'off'}",
        f"# {len(topology.engines)} engine(s), {rollout.engine}, {engine_dtype(config)} precision "
        f"(model: {config.model.dtype})",
    ]
    if on_own_python := engine_python(rollout.python):
        lines.append(f"# engines run under {on_own_python}")
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    lines += [f"# {line}" for line in describe_ranks(layout, ranks_per_node)]
    for line, share in zip(topology.describe(), shares, strict=True):
        lines.append(f"# {line}; prompts {share.start} to {share.stop - 1} of a batch")
    return "\n".join(lines)


def engine_config(config: Config, folder: Path, place: EnginePlace) -> VLLMEngineConfig:
    """Return the settings of one vLLM engine."""
    rollout = config.rollout
    return VLLMEngineConfig(
        model_path=config.model.path,
        dtype=engine_dtype(config),
        max_model_len=longest_sequence(config),
        max_num_seqs=rollout.max_num_seqs,
        top_logprobs=rollout.top_logprobs,
        seed=place.seed,
        device=config.run.device,
        python=rollout.python,
        kv_cache_gib=rollout.kv_cache_gib,
        threads=_engine_threads(config),
        visible_devices=place.devices,
        start_timeout_s=rollout.start_timeout_s,
        stall_timeout_s=rollout.stall_timeout_s,
        max_restarts=rollout.max_restarts,
        log_path=str(folder / "logs" / place.log_name),
        transport=_transport(config, auto="shared_memory"),
        quantization=config.bridge.quantization,
        scales=config.bridge.scales,
        bucket_mib=config.bridge.bucket_mib,
        digests=config.bridge.certificate != "off",
        sleep=rollout.sleep,
        engine_args=rollout.engine_args,
    )


def server_config(config: Config) -> VLLMServerConfig:
    """Return what a run needs of the vLLM server that it samples from."""
    rollout = config.rollout
    return VLLMServerConfig(
        url=rollout.server_url,
        model_path=config.model.path,
        max_model_len=longest_sequence(config),
        token_variable=rollout.server_token_variable,
        allow_remote=rollout.server_allow_remote,
        max_num_seqs=rollout.max_num_seqs,
        top_logprobs=rollout.top_logprobs,
        transport=_transport(config, auto="auto"),
        quantization=config.bridge.quantization,
        scales=config.bridge.scales,
        bucket_mib=config.bridge.bucket_mib,
        digests=config.bridge.certificate != "off",
        sleep=rollout.sleep,
        start_timeout_s=rollout.start_timeout_s,
        stall_timeout_s=rollout.stall_timeout_s,
    )


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt and response, of training and of evaluation."""
    rollout = config.rollout
    longest = max(rollout.max_response_tokens, config.eval.response_limit(rollout))
    return rollout.max_prompt_tokens + longest


def _transport(config: Config, auto: str) -> str:
    kind = config.bridge.transport
    return auto if kind == "auto" else kind


def make_engine(
    config: Config, folder: Path, place: EnginePlace, on_event: Callable[[str], None]
) -> RolloutEngine:
    """Make the engine at ``place``; one with a process of its own starts at once."""
    if config.rollout.engine == "replay":
        assert config.rollout.replay_from is not None
        return ReplayEngine(config.rollout.replay_from)
    if config.rollout.engine == "vllm_server":
        return VLLMServerEngine(server_config(config), on_event=on_event)
    engine = VLLMEngine(engine_config(config, folder, place), on_event=on_event)
    engine.start()  # loads while the trainer builds its model
    return engine


def engine_dtype(config: Config) -> str:
    """Precision of the engine's weights."""
    dtype = config.rollout.dtype
    return config.model.dtype if dtype == "same" else dtype


def engine_settings(config: Config) -> dict[str, Any]:
    """What a rollout record says of the engine."""
    return {
        "engine": config.rollout.engine,
        "model_path": config.model.path,
        "dtype": engine_dtype(config),
        "quantization": config.bridge.quantization,
        "scales": config.bridge.scales,
        "device": config.run.device,
        "engine_args": dict(config.rollout.engine_args),
        "replay_from": config.rollout.replay_from,
    }


def _engine_threads(config: Config) -> int | None:
    """CPU threads of an engine: those asked for, or an equal share of the cores."""
    rollout = config.rollout
    if rollout.threads is not None or config.run.device != "cpu" or rollout.engines_per_node == 1:
        return rollout.threads
    return max(1, (os.cpu_count() or 1) // rollout.engines_per_node)


def _node_devices(config: Config, ranks: int) -> NodeDevices:
    import torch

    each = 1
    for name in PARALLEL_ARGUMENTS:
        each *= int(config.rollout.engine_args.get(name, 1))
    sharing: Literal["own", "shared", "spare"] = "spare"
    if config.rollout.sleep or config.bridge.transport == "cuda_ipc":
        sharing = "shared"
    elif config.bridge.transport == "nccl":
        sharing = "own"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        names = visible.split(",")
    elif torch.cuda.is_available():
        names = [str(number) for number in range(torch.cuda.device_count())]
    else:
        # A plan (--dry-run) for a machine that is not this one: as many GPUs as it needs.
        wanted = each * config.rollout.engines_per_node
        names = [str(i) for i in range(ranks + wanted if sharing == "own" else max(ranks, wanted))]
    return NodeDevices(names, each, sharing)
