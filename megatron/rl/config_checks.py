# SPDX-License-Identifier: Apache-2.0
"""Which values of a run's settings are refused: out of range, or without effect."""

from typing import TYPE_CHECKING

from megatron.rl.errors import UserError

if TYPE_CHECKING:
    from megatron.rl.config import Config, RolloutConfig

# vLLM returns at most as many log-probs as it was started with; rollouts of more than this are no
# longer compact (8 bytes an entry a token).
MAX_TOP_LOGPROBS = 512


def check_ranges(config: "Config") -> None:
    """Raise UserError for the first setting that is out of range or has no effect."""
    _require(bool(config.model.path), "model.path", "a Hugging Face model folder", "")
    _require(bool(config.task.name), "task.name", "a task, reasoning_gym/<data set>", "")
    positive = {
        "rollout": ("prompts", "group_size", "max_prompt_tokens", "max_response_tokens",
                    "max_num_seqs", "temperature", "kv_cache_gib", "start_timeout_s",
                    "stall_timeout_s"),
        "bridge": ("bucket_mib", "probe_sequences", "probe_tolerance"),
        "train": ("minibatch_prompts", "epochs", "micro_batch_tokens", "learning_rate",
                  "clip_grad"),
        "eval": ("prompts",),
    }  # fmt: skip
    for section, names in positive.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            _require(value is None or value > 0, f"{section}.{name}", "a positive number", value)
    _require(config.train.rollouts >= 0, "train.rollouts", "0 or more", config.train.rollouts)
    _check_rollout(config.rollout)
    _check_replay_and_records(config)
    _check_bridge(config)
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


def _check_rollout(rollout: "RolloutConfig") -> None:
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(rollout, name)
        if value != off:
            raise UserError(
                f"rollout.{name} is {value}, expected {off}: it changes the support of the "
                "behavior policy, so that its log-probs and the trainer's no longer belong to the "
                "same distribution (evaluation has eval.top_p of its own)"
            )
    _require(
        1 <= rollout.top_logprobs <= MAX_TOP_LOGPROBS,
        "rollout.top_logprobs",
        f"1 to {MAX_TOP_LOGPROBS} (the engine's limit)",
        rollout.top_logprobs,
    )


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
        bridge.quantization == "block_fp8" or bridge.scales == "power_of_two",
        "bridge.scales",
        "power_of_two: it has no effect unless bridge.quantization is block_fp8",
        bridge.scales,
    )


def _require(condition: bool, setting: str, expected: str, value: object) -> None:
    if not condition:
        raise UserError(f"{setting}: expected {expected}, got {value!r}")
