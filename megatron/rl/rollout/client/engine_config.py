# SPDX-License-Identifier: Apache-2.0
"""How to run a vLLM engine: the settings, and what they become for the worker process."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..checkpoint_index import CheckpointIndex, read_checkpoint_index
from ..errors import EngineConfigError
from .engine_python import check_engine_python, engine_python

EXTENSION_CLASS = "megatron.rl.rollout.worker.worker_extension.RolloutWorkerExtension"

# Arguments of vLLM that this project sets itself; the value says where to change them instead.
RESERVED_ENGINE_ARGS: Mapping[str, str] = {
    "model": "set model_path",
    "dtype": "set dtype",
    "max_model_len": "set max_model_len",
    "max_num_seqs": "set max_num_seqs",
    "max_logprobs": "set top_logprobs",
    "seed": "set seed",
    "kv_cache_memory_bytes": "set kv_cache_gib",
    "tokenizer": "the engine sees token ids only",
    "skip_tokenizer_init": "the engine sees token ids only",
    "logprobs_mode": "the trainer needs log-probs of what was sampled from",
    "logits_processors": "they change mu behind the trainer's back",
    "generation_config": "sampling is decided by each request",
    "override_generation_config": "sampling is decided by each request",
    "worker_extension_cls": "it carries the weight updates",
    "weight_transfer_config": "set transport",
    "enable_sleep_mode": "set sleep",
    "runner": "the engine generates",
    "convert": "the engine generates",
}

# Arguments of vLLM that multiply the workers of an engine.
PARALLEL_ARGUMENTS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

# Prompt and response tokens that a CPU engine takes in at one step, at least.
CPU_TOKENS_PER_STEP = 8192

# What a torchrun rank or a trainer sets for itself. With RANK and MASTER_* in its environment the
# engine would join the trainer's process group instead of making its own.
_TRAINER_PREFIXES = (
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "PET_",
    "OMP_",
    "KMP_",
    "GOMP_",
)
_TRAINER_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "MKL_NUM_THREADS",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "VLLM_CPU_KVCACHE_SPACE",
    }
)


@dataclass(frozen=True)
class VLLMEngineConfig:
    """Settings of one engine process. `VLLMEngine` checks them before it starts anything.

    model_path       Hugging Face checkpoint folder with weights; the engine starts from it
    dtype            "auto", "float32", "bfloat16" or "float16"
    max_model_len    longest prompt + response, in tokens
    max_num_seqs     sequences that are decoded together
    top_logprobs     the largest K that a request may ask for
    seed             of the engine's own generator, for requests without a seed; give each engine
                     of a run another one
    device           "cpu" or "cuda"; it must match the vLLM that `python` has
    python           interpreter that has vLLM; None: what PDM_RL_ROLLOUT_PYTHON names, else this
    kv_cache_gib     memory for the KV cache; None: 1 on "cpu"; on "cuda" what
                     gpu_memory_utilization leaves
    threads          OpenMP threads on "cpu"; None: all cores
    visible_devices  CUDA_VISIBLE_DEVICES of the engine; None: inherited
    start_timeout_s  until the first weights are loaded
    stall_timeout_s  longest silence during work before the engine counts as hung
    max_restarts     restarts per run after a death or a hang, before giving up
    log_path         everything that vLLM prints; None: a file in the temporary folder, which a
                     clean close removes
    transport        how weights get there: "shared_memory", "cuda_ipc" or "nccl"
    quantization     "block_fp8": linear layers in e4m3. On "cuda" the engine computes with them; on
                     "cpu" it turns them back at the door, so that only the products are exact
    scales           of block_fp8: "power_of_two" or "float32"
    bucket_mib       the engine is told of new weights when this much has been packed
    sleep            the engine can sleep ("cuda" only)
    digests          compare digests of what was sent and what the engine holds after each update
    engine_args      any other argument of vllm.LLM (tensor_parallel_size, quantization,
                     gpu_memory_utilization, enforce_eager, ...), as it is
    """

    model_path: str
    dtype: str = "auto"
    max_model_len: int = 4096
    max_num_seqs: int = 64
    top_logprobs: int = 20
    seed: int = 0
    device: str = "cuda"
    python: str | None = None
    kv_cache_gib: float | None = None
    threads: int | None = None
    visible_devices: str | None = None
    start_timeout_s: float = 900.0
    stall_timeout_s: float = 300.0
    max_restarts: int = 2
    log_path: str | None = None
    transport: str = "shared_memory"
    quantization: Literal["none", "block_fp8"] = "none"
    scales: Literal["power_of_two", "float32"] = "power_of_two"
    bucket_mib: int = 256
    digests: bool = True
    sleep: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise EngineConfigError(f'device must be "cpu" or "cuda", got {self.device!r}')
        for name, value, least in (
            ("max_model_len", self.max_model_len, 2),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("top_logprobs", self.top_logprobs, 0),
            ("max_restarts", self.max_restarts, 0),
            ("seed", self.seed, 0),
            ("threads", self.threads, 1),
            ("bucket_mib", self.bucket_mib, 1),
        ):
            if value is not None and value < least:
                raise EngineConfigError(f"{name} must be at least {least}, got {value}")
        for name, seconds in (
            ("start_timeout_s", self.start_timeout_s),
            ("stall_timeout_s", self.stall_timeout_s),
            ("kv_cache_gib", self.kv_cache_gib),
        ):
            if seconds is not None and not seconds > 0:
                raise EngineConfigError(f"{name} must be above 0, got {seconds}")
        for name, choice, choices in (
            ("quantization", self.quantization, ("none", "block_fp8")),
            ("scales", self.scales, ("power_of_two", "float32")),
        ):
            if choice not in choices:
                raise EngineConfigError(f"{name} must be one of {choices}, got {choice!r}")
        for name, reason in RESERVED_ENGINE_ARGS.items():
            if name in self.engine_args:
                raise EngineConfigError(f"engine_args may not set {name!r}: {reason}")
        if self.device == "cpu" and self.visible_devices is not None:
            raise EngineConfigError('visible_devices has no effect with device "cpu"; remove it')
        if self.device == "cpu" and self.engine_args.get("enable_chunked_prefill"):
            # For a prompt that is spread over several steps, vLLM 0.32 winds the generator of a
            # seeded request back by an offset that only GPU generators have.
            raise EngineConfigError(
                'engine_args may not enable_chunked_prefill with device "cpu": a seeded request '
                "with a long prompt would end the engine (CPU generators have no offset)"
            )
        if self.device == "cpu" and self.sleep:
            raise EngineConfigError(
                'sleep has no effect with device "cpu", where vLLM cannot sleep: set rollout.sleep '
                "to false"
            )
        if self.device == "cpu" and self.transport in ("cuda_ipc", "nccl"):
            raise EngineConfigError(
                f'transport {self.transport} needs device "cuda": set bridge.transport to auto'
            )
        if self.device == "cuda" and self.threads is not None:
            raise EngineConfigError('threads has no effect with device "cuda"; remove it')
        if self.computes_in_fp8 and "quantization" in self.engine_args:
            raise EngineConfigError(
                "engine_args may not set 'quantization': it is block_fp8 already; remove one"
            )

    @property
    def num_workers(self) -> int:
        """vLLM workers of the engine, each with a part of the model on a device of its own."""
        sizes = (self.engine_args.get(name, 1) for name in PARALLEL_ARGUMENTS)
        return math.prod(int(size) for size in sizes)

    @property
    def computes_in_fp8(self) -> bool:
        """Whether block FP8 goes into the engine as it is; a CPU dequantises it at the door."""
        return self.quantization == "block_fp8" and self.device == "cuda"


def check_model(config: VLLMEngineConfig) -> CheckpointIndex:
    """Read the model folder; raise EngineConfigError when it cannot serve this configuration.

    That includes an interpreter of the engine's own that has not the vLLM that is needed.

    vLLM 0.32 has no limit of its own on K: it takes any `max_logprobs`, and then fails inside
    `torch.topk` at the first token when K exceeds the vocabulary. The vocabulary is the limit.
    """
    python = engine_python(config.python)
    if python is not None:
        check_engine_python(python)
    index = read_checkpoint_index(config.model_path)
    if config.top_logprobs > index.vocab_size:
        raise EngineConfigError(
            f"top_logprobs={config.top_logprobs} is above the model's vocabulary of "
            f"{index.vocab_size} tokens: lower top_logprobs (20 is usual)"
        )
    tensor_parallel = int(config.engine_args.get("tensor_parallel_size", 1))
    if tensor_parallel > 1 or config.computes_in_fp8:
        from megatron.rl.errors import UserError
        from megatron.rl.model.architecture import read_architecture
        from megatron.rl.weights.engine_layout import check_engine_layout

        try:
            check_engine_layout(
                read_architecture(config.model_path),
                tensor_parallel,
                "block_fp8" if config.computes_in_fp8 else "none",
                expert_parallel=bool(config.engine_args.get("enable_expert_parallel")),
            )
        except UserError as error:
            raise EngineConfigError(str(error)) from None
    return index


def llm_arguments(config: VLLMEngineConfig) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM, as JSON can carry them."""
    arguments: dict[str, Any] = {
        "model": str(Path(config.model_path).resolve()),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_logprobs": config.top_logprobs,
        "seed": config.seed,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION_CLASS,
        "enable_sleep_mode": config.sleep,
    }
    kv_cache_gib = config.kv_cache_gib
    if config.device == "cpu":
        # Compilation takes longer than most CPU runs, and vLLM's default for the KV cache is a
        # share of all memory that the trainer beside it also wants.
        arguments["enforce_eager"] = True
        # See the refusal of `enable_chunked_prefill` above; whole prompts must fit into a step.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(config.max_model_len, CPU_TOKENS_PER_STEP)
        kv_cache_gib = 1.0 if kv_cache_gib is None else kv_cache_gib
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * (1 << 30))
    arguments.update(config.engine_args)
    return arguments


def fp8_arguments(config: VLLMEngineConfig, index: CheckpointIndex) -> dict[str, Any]:
    """Arguments of vllm.LLM for an engine that computes in block FP8.

    Its layers have the layout of an FP8 checkpoint, which the model folder does not hold, so it
    starts with dummy weights, and is given the trainer's before the first prompt.
    """
    if not config.computes_in_fp8:
        return {}
    from megatron.rl.weights.block_fp8 import BlockFP8, is_quantized, quantization_config

    plain = [
        name.removesuffix(".weight")
        for name, info in index.tensors.items()
        if len(info.shape) == 2 and name.endswith(".weight") and not is_quantized(name)
    ]
    overrides = dict(config.engine_args.get("hf_overrides", {}))
    overrides["quantization_config"] = quantization_config(BlockFP8(config.scales), plain)
    return {"hf_overrides": overrides, "load_format": "dummy"}


def worker_environment(
    config: VLLMEngineConfig, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of the worker: the trainer's, without what makes a process a training rank."""
    source = os.environ if inherited is None else inherited
    environment = {
        name: value
        for name, value in source.items()
        if name not in _TRAINER_NAMES and not name.startswith(_TRAINER_PREFIXES)
    }
    # The worker's Python may have no installed copy of this project.
    project = str(Path(__file__).resolve().parents[3])
    paths = [project, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        PYTHONUNBUFFERED="1",
    )
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if config.device == "cpu":
        # One process, so that a step of the engine is a step of the worker; and no pinning of
        # threads to cores that the trainer uses as well.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # A waiting thread that spins steals the core from the thread that it waits for as soon as
        # anything else runs: with 2 threads on 2 shared cores, decoding was 2 to 10 times slower.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        if config.engine_args.get("enforce_eager", True):
            # vLLM compiles one helper of its sampler all the same. That takes 3 to 15 s at the
            # first token of every process, needs a C++ compiler, and gains nothing on a CPU.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        if config.threads is not None:
            environment["OMP_NUM_THREADS"] = str(config.threads)
    if config.visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = config.visible_devices
    return environment


def worker_python(config: VLLMEngineConfig) -> str:
    """The interpreter that the worker runs under."""
    return engine_python(config.python) or sys.executable
