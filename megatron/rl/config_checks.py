# SPDX-License-Identifier: Apache-2.0
"""Which values of a run's settings are refused: out of range, or without effect."""

import math
from typing import TYPE_CHECKING

from megatron.rl.checkpoint.config_check import check_checkpoint
from megatron.rl.data.prompt_template import check_template
from megatron.rl.errors import UserError
from megatron.rl.evaluation.config_check import check_eval
from megatron.rl.rollout.client.engine_config import PARALLEL_ARGUMENTS

if TYPE_CHECKING:
    from megatron.rl.config import Config, RolloutConfig
    from megatron.rl.parallel import ParallelConfig
    from megatron.rl.rewards.scoring_limits import ScoringLimits

# vLLM returns at most as many log-probs as it was started with; rollouts of more than this are no
# longer compact (8 bytes an entry a token).
MAX_TOP_LOGPROBS = 512
# Far above any engine and any node; a larger number is a slip that would be planned for.
MAX_ENGINE_GPUS = 1 << 10
MAX_ENGINES_PER_NODE = 64
MAX_RANKS = 1 << 16


def check_ranges(config: "Config") -> None:
    """Raise UserError for the first setting that is out of range or has no effect."""
    _require(bool(config.model.path), "model.path", "a Hugging Face model folder", "")
    _require(bool(config.task.name), "task.name", "a task, reasoning_gym/<data set>", "")
    positive = {
        "rollout": ("prompts", "group_size", "max_prompt_tokens", "max_response_tokens",
                    "max_num_seqs", "temperature", "kv_cache_gib", "start_timeout_s",
                    "stall_timeout_s"),
        "scoring": ("responses_per_worker",),
        "bridge": ("bucket_mib", "probe_sequences", "probe_tolerance"),
        "train": ("minibatch_prompts", "epochs", "micro_batch_tokens", "learning_rate",
                  "clip_grad"),
        "eval": ("prompts", "max_response_tokens", "samples", "problems"),
    }  # fmt: skip
    for section, names in positive.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            _require(value is None or value > 0, f"{section}.{name}", "a positive number", value)
    _require(config.train.rollouts >= 0, "train.rollouts", "0 or more", config.train.rollouts)
    _check_layout(config.parallel)
    check_template(config.task.template, config.task.system_prompt, config.task.template_args)
    _check_rollout(config.rollout)
    check_scoring(config.scoring)
    _check_refill(config.rollout)
    _check_reward(config)
    _check_replay_and_records(config)
    check_eval(config)
    check_checkpoint(config)
    _check_bridge(config)
    _check_fp8(config)
    _require(
        config.loss.kl_coefficient == 0,
        "loss.kl_coefficient",
        "0: this trainer has no reference policy yet",
        config.loss.kl_coefficient,
    )
    if config.policy.head == "fused":
        _require(
            config.policy.logits_dtype == "float32",
            "policy.logits_dtype",
            "float32 with policy.head fused, which has no other",
            config.policy.logits_dtype,
        )
    _require(
        config.train.minibatch_prompts <= config.rollout.prompts,
        "train.minibatch_prompts",
        f"at most rollout.prompts ({config.rollout.prompts})",
        config.train.minibatch_prompts,
    )


def _check_layout(parallel: "ParallelConfig") -> None:
    """Refuse sizes with which nothing can be counted; ``ParallelConfig.check`` knows the model."""
    for name in ("tensor", "pipeline", "context", "data", "expert"):
        value = getattr(parallel, name)
        _require(1 <= value <= MAX_RANKS, f"parallel.{name}", f"1 to {MAX_RANKS}", value)
    _require(
        parallel.world_size <= MAX_RANKS,
        "parallel",
        f"at most {MAX_RANKS} ranks, tensor x pipeline x context x data",
        parallel.world_size,
    )


def _check_rollout(rollout: "RolloutConfig") -> None:
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(rollout, name)
        if value != off:
            raise UserError(
                f"rollout.{name} is {value}, expected {off}: it changes the support of the "
                "behavior policy, so that its log-probs and the trainer's no longer belong to the "
                "same distribution (evaluation has eval.top_p of its own)"
            )
    for name in PARALLEL_ARGUMENTS:
        value = rollout.engine_args.get(name, 1)
        _require(
            type(value) is int and 1 <= value <= MAX_ENGINE_GPUS,
            f"rollout.engine_args.{name}",
            f"an integer from 1 to {MAX_ENGINE_GPUS}",
            value,
        )
    _require(
        math.prod(rollout.engine_args.get(name, 1) for name in PARALLEL_ARGUMENTS)
        <= MAX_ENGINE_GPUS,
        "rollout.engine_args",
        f"at most {MAX_ENGINE_GPUS} GPUs, the product of {', '.join(PARALLEL_ARGUMENTS)}",
        dict(rollout.engine_args),
    )
    _require(
        1 <= rollout.engines_per_node <= MAX_ENGINES_PER_NODE,
        "rollout.engines_per_node",
        f"1 to {MAX_ENGINES_PER_NODE}",
        rollout.engines_per_node,
    )
    value = rollout.engine_args.get("gpu_memory_utilization", 1.0)
    _require(
        isinstance(value, int | float) and 0 < value <= 1,
        "rollout.engine_args.gpu_memory_utilization",
        "a number above 0 and up to 1",
        value,
    )
    _require(
        1 <= rollout.top_logprobs <= MAX_TOP_LOGPROBS,
        "rollout.top_logprobs",
        f"1 to {MAX_TOP_LOGPROBS} (the engine's limit)",
        rollout.top_logprobs,
    )


def _check_refill(rollout: "RolloutConfig") -> None:
    rounds = rollout.refill_rounds
    _require(rounds >= 0, "rollout.refill_rounds", "0 (off) or more", rounds)
    _require(
        rounds > 0 or rollout.refill_policy == "smaller",
        "rollout.refill_policy",
        "smaller: it has no effect unless rollout.refill_rounds is above 0",
        rollout.refill_policy,
    )
    _require(
        rounds == 0 or rollout.group_size > 1,
        "rollout.group_size",
        "at least 2 with rollout.refill_rounds: the scores of a group of one never differ",
        rollout.group_size,
    )


def _check_reward(config: "Config") -> None:
    reward, longest = config.reward, config.rollout.max_response_tokens
    _require(
        0 <= reward.overlong_buffer_tokens <= longest,
        "reward.overlong_buffer_tokens",
        f"0 (off) to rollout.max_response_tokens ({longest}): a longer buffer penalises every "
        "response",
        reward.overlong_buffer_tokens,
    )
    for name in ("overlong_penalty", "format_penalty", "length_penalty"):
        value = getattr(reward, name)
        _require(
            value >= 0 and math.isfinite(value), f"reward.{name}", "a number of 0 or more", value
        )
    if reward.overlong_buffer_tokens:
        _require(
            reward.overlong_penalty > 0,
            "reward.overlong_penalty",
            "a positive number with reward.overlong_buffer_tokens",
            reward.overlong_penalty,
        )
    else:
        _require(
            reward.overlong_penalty == 1.0,
            "reward.overlong_penalty",
            "1.0: it has no effect unless reward.overlong_buffer_tokens is above 0",
            reward.overlong_penalty,
        )


def check_scoring(scoring: "ScoringLimits") -> None:
    """Raise UserError for a limit that is out of range."""
    for name, least, most in (
        ("workers", 1, 256),
        ("timeout_s", 0.1, 3600),
        ("memory_mib", 16, 1 << 20),
        ("start_timeout_s", 1, 86_400),
    ):
        value = getattr(scoring, name)
        in_range = value is None or least <= value <= most
        _require(in_range, f"scoring.{name}", f"{least} to {most}", value)


def _check_replay_and_records(config: "Config") -> None:
    rollout, records = config.rollout, config.records
    if rollout.engine == "replay":
        _require(
            rollout.replay_from is not None,
            "rollout.replay_from",
            "the folder rollouts of a run with records.write",
            rollout.replay_from,
        )
        _require(not rollout.sleep, "rollout.sleep", "false with rollout.engine replay", True)
    else:
        _require(
            rollout.replay_from is None,
            "rollout.replay_from",
            f"null: it has no effect with rollout.engine {rollout.engine}",
            rollout.replay_from,
        )
    _require(records.keep >= 0, "records.keep", "0 (keep all) or more", records.keep)
    _require(
        records.write or not records.keep,
        "records.keep",
        "0: it has no effect unless records.write is true",
        records.keep,
    )


def _check_bridge(config: "Config") -> None:
    bridge, rollout = config.bridge, config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if bridge.certificate == "full" and rollout.engine != "replay":
        # A sequence of one token has no log-prob; the engine samples one more than it scores.
        _require(
            2 <= bridge.probe_tokens < longest,
            "bridge.probe_tokens",
            f"2 to {longest - 1}, below rollout.max_prompt_tokens + max_response_tokens",
            bridge.probe_tokens,
        )
    else:
        _require(
            bridge.probe_tolerance is None,
            "bridge.probe_tolerance",
            "null: it has no effect without the log-probs of bridge.certificate full",
            bridge.probe_tolerance,
        )
    _require(
        bridge.scales == "power_of_two"
        or bridge.quantization == "block_fp8"
        or config.model.fp8 == "blockwise",
        "bridge.scales",
        "power_of_two: it has no effect unless bridge.quantization is block_fp8 or model.fp8 is "
        "blockwise",
        bridge.scales,
    )


def _check_fp8(config: "Config") -> None:
    model, ddp = config.model, config.megatron.ddp
    _require(
        "fp8_param_gather" not in ddp,
        "megatron.ddp.fp8_param_gather",
        "nothing: it is set from model.fp8_params",
        ddp.get("fp8_param_gather"),
    )
    if model.fp8 == "none":
        off = {"fp8_format": "e4m3", "fp8_params": False, "fp8_skip_first": 0, "fp8_skip_last": 0}
        for name, default in off.items():
            value = getattr(model, name)
            expected = f"{default!r}: it has no effect while model.fp8 is none"
            _require(value == default, f"model.{name}", expected, value)
        return
    for name in ("fp8_skip_first", "fp8_skip_last"):
        value = getattr(model, name)
        _require(value >= 0, f"model.{name}", "0 or more", value)
        if model.fp8 == "delayed":
            expected = "0: delayed scaling covers all layers or none"
            _require(value == 0, f"model.{name}", expected, value)
    if config.run.device == "cpu":
        expected = "blockwise or none with run.device cpu"
        _require(model.fp8 == "blockwise", "model.fp8", expected, model.fp8)
        _require(not model.fp8_params, "model.fp8_params", "false with run.device cpu", True)
    _require(
        not model.fp8_params or ddp.get("use_distributed_optimizer", True),
        "model.fp8_params",
        "false without megatron.ddp.use_distributed_optimizer",
        True,
    )


def _require(condition: bool, setting: str, expected: str, value: object) -> None:
    if not condition:
        raise UserError(f"{setting}: expected {expected}, got {value!r}")
