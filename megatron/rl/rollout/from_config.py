# SPDX-License-Identifier: Apache-2.0
"""The rollout engine that a run's config asks for."""

from pathlib import Path

from megatron.rl.config import Config
from megatron.rl.rollout.engine_config import VLLMEngineConfig


def engine_config(config: Config, folder: Path) -> VLLMEngineConfig:
    """Return the settings of the rollout engine that a run's config asks for."""
    rollout = config.rollout
    return VLLMEngineConfig(
        model_path=config.model.path,
        dtype=config.model.dtype if rollout.dtype == "same" else rollout.dtype,
        max_model_len=rollout.max_prompt_tokens + rollout.max_response_tokens,
        max_num_seqs=rollout.max_num_seqs,
        top_logprobs=rollout.top_logprobs,
        seed=config.run.seed,
        device=config.run.device,
        python=rollout.python,
        kv_cache_gib=rollout.kv_cache_gib,
        threads=rollout.threads,
        start_timeout_s=rollout.start_timeout_s,
        stall_timeout_s=rollout.stall_timeout_s,
        max_restarts=rollout.max_restarts,
        log_path=str(folder / "logs" / "engine.log"),
        engine_args=rollout.engine_args,
    )
