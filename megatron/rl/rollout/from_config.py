# SPDX-License-Identifier: Apache-2.0
"""The rollout engine that a run's config asks for."""

from pathlib import Path
from typing import Any

from megatron.rl.config import Config
from megatron.rl.rollout.engine_config import VLLMEngineConfig

# Prompt tokens that a CPU engine takes in at one step.
MIN_BATCHED_TOKENS = 8192


def engine_config(config: Config, folder: Path) -> VLLMEngineConfig:
    """Return the settings of the rollout engine that a run's config asks for."""
    rollout = config.rollout
    on_cpu = config.run.device == "cpu"
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    extra = _cpu_engine_args(longest) if on_cpu else {}
    return VLLMEngineConfig(
        model_path=config.model.path,
        dtype=config.model.dtype if rollout.dtype == "same" else rollout.dtype,
        max_model_len=longest,
        max_num_seqs=rollout.max_num_seqs,
        top_logprobs=rollout.top_logprobs,
        seed=config.run.seed,
        device="cpu" if on_cpu else "cuda",
        python=rollout.python,
        kv_cache_gib=rollout.kv_cache_gib if on_cpu else None,
        threads=rollout.threads,
        start_timeout_s=rollout.start_timeout_s,
        stall_timeout_s=rollout.stall_timeout_s,
        max_restarts=rollout.max_restarts,
        log_path=str(folder / "logs" / "engine.log"),
        engine_args=extra | rollout.engine_args,
    )


def _cpu_engine_args(max_model_len: int) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        # A seeded request whose prompt is cut over two steps makes vLLM rewind its generator by a
        # GPU-only offset (gpu_model_runner.py:3502), which raises on CPU; so none is cut.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, MIN_BATCHED_TOKENS),
    }
