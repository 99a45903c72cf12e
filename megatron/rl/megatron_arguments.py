# SPDX-License-Identifier: Apache-2.0
"""Megatron's command line with this project's settings: the flags, and what they mean together.

Every setting of the config file is one flag, ``--pdm-SECTION-NAME`` with the file's name and
default (those of ``loss`` without the section: ``--pdm-mask``). Settings that Megatron has a flag
for are Megatron's: :data:`FROM_MEGATRON`. Megatron's flags that this loss or engine does not read
are refused when typed, never ignored: :data:`_WITHOUT_EFFECT`.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.rl.config import Config, RolloutConfig, parse_config
from megatron.rl.errors import UserError
from pdm import PolicyLossConfig

# Settings of the config file -> the flag of Megatron's that says it. They have no --pdm flag.
FROM_MEGATRON = {
    "run.seed": "--seed",
    "run.export": "--save",
    "model.dtype": "--bf16",
    "model.fp8": "--fp8-recipe",
    "model.fp8_format": "--fp8-format",
    "model.fp8_params": "--fp8-param-gather",
    "model.fp8_skip_first": "--num-layers-at-start-in-bf16",
    "model.fp8_skip_last": "--num-layers-at-end-in-bf16",
    "rollout.prompts": "--grpo-prompts-per-step",
    "rollout.group_size": "--grpo-group-size",
    "rollout.temperature": "--rl-default-temperature",
    "rollout.top_p": "--rl-default-top-p",
    "rollout.top_k": "--rl-default-top-k",
    "train.rollouts": "--train-iters",
    "train.minibatch_prompts": "--global-batch-size",
    "train.epochs": "--grpo-iterations",
    "train.micro_batch_tokens": "--micro-batch-size",
    "train.learning_rate": "--lr",
    "train.min_learning_rate": "--min-lr",
    "train.warmup_steps": "--lr-warmup-iters",
    "train.schedule": "--lr-decay-style",
    "train.weight_decay": "--weight-decay",
    "train.clip_grad": "--clip-grad",
    "eval.prompts": "--rl-prompts-per-eval",
    "eval.every": "--eval-interval",
}
# Sections without flags: Megatron's own arguments say all of them.
_WITHOUT_FLAGS = frozenset({"parallel", "megatron"})

# Collectives on both sides; Megatron's default, nccl, has none on the host.
GPU_BACKEND = "cpu:gloo,cuda:nccl"

_HOPPER = (9, 0)

# Further names of a flag.
_ALIASES = {"rollout.top_logprobs": "--pdm-top-k", "run.device": "--pdm-device"}

# A setting of the loss -> the masks that read it. With another mask it would change nothing.
_READ_BY_MASKS = {
    "direction": ("divergence",),
    "threshold": ("divergence",),
    "clip_low": ("ratio_clip",),
    "clip_high": ("ratio_clip",),
}

_ENGINE_IS_VLLM = "rollouts come from a vLLM engine, not from a Megatron model; see --pdm-rollout-*"
_ALWAYS_PACKED = (
    "sequences are always packed: --micro-batch-size says how many go into one forward pass"
)
_FROM_ROLLOUTS = "the ratio is taken to the log-probs of the rollout itself; see --pdm-ratio-cap"

# Megatron's argument -> why typing it is a mistake here.
_WITHOUT_EFFECT = {
    "grpo_clamp_eps_lower": "use --pdm-mask ratio_clip with --pdm-clip-low",
    "grpo_clamp_eps_upper": "use --pdm-mask ratio_clip with --pdm-clip-high",
    "grpo_kl_beta": "use --pdm-kl-coefficient",
    "grpo_entropy_term_weight": "use --pdm-entropy-coefficient",
    "grpo_filter_groups_with_same_reward": "groups of one reward have advantage 0 and stay",
    "langrl_env_config": "use --pdm-task-name and --pdm-task-params",
    "rl_generation_lag": "rollouts are of the newest weights",
    "rl_submission_granularity": "rollouts are of the newest weights",
    "rl_consumption_granularity": "rollouts are of the newest weights",
    "rl_partial_rollouts": "rollouts are of the newest weights",
    "rl_offload_optimizer_during_inference": "use --pdm-rollout-sleep",
    "rl_kv_cache_management_mode": "use --pdm-rollout-sleep",
    "rl_persist_cuda_graphs": _ENGINE_IS_VLLM,
    "rl_training_cuda_graphs": "packed micro-batches differ in length",
    "rl_inference_logprobs_is_correction": _FROM_ROLLOUTS,
    "rl_importance_sampling_truncation_coef": _FROM_ROLLOUTS,
    "rl_use_sequence_packing": _ALWAYS_PACKED,
    "rl_sequence_packing_max_sequences_per_bin": _ALWAYS_PACKED,
    "rl_sequence_packing_algo": _ALWAYS_PACKED,
    "rl_inference_tensor_model_parallel_size": _ENGINE_IS_VLLM,
    "rl_inference_pipeline_model_parallel_size": _ENGINE_IS_VLLM,
    "rl_inference_expert_model_parallel_size": _ENGINE_IS_VLLM,
    "rl_inference_expert_tensor_model_parallel_size": _ENGINE_IS_VLLM,
    "rl_inference_model_unified_memory_level": _ENGINE_IS_VLLM,
    "rl_offload_inference_model_weights_when_idle": _ENGINE_IS_VLLM,
    "refit_method": "use --pdm-bridge-transport",
    "rl_verify_model_weights_swap": "use --pdm-bridge-certificate",
    "rl_skip_bos_token": "prompts are the chat template's",
    "rl_inference_parsers": _ENGINE_IS_VLLM,
    "skip_train": "pretrain() here trains; evaluate a checkpoint with pdm-rl",
    "yaml_cfg": "type Megatron's settings as flags",
    "use_checkpoint_args": "type the model as flags; they are compared with --pdm-model-path",
    "fp16": "use --bf16, or neither for float32",
}


@dataclass(frozen=True)
class Flag:
    """One ``--pdm-*`` flag.

    Attributes:
        setting: its name in the config file, ``section.name``, deeper for a section within one.
        default: what the file would have without it.
        choices: the only values, or empty.
    """

    setting: str
    default: Any
    choices: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        parts = self.setting.removeprefix("loss.").replace(".", "-").replace("_", "-")
        aliases = [_ALIASES[self.setting]] if self.setting in _ALIASES else []
        return [f"--pdm-{parts}", *aliases]

    @property
    def dest(self) -> str:
        return self.options[0].removeprefix("--").replace("-", "_")


def flags() -> list[Flag]:
    """Return the flag of every setting that is not Megatron's own."""
    return [
        flag
        for section in dataclasses.fields(Config)
        if section.name not in _WITHOUT_FLAGS
        for flag in _flags_of(typing.get_type_hints(Config)[section.name], section.name)
        if flag.setting not in FROM_MEGATRON
    ]


def _flags_of(schema: Any, prefix: str) -> Iterator[Flag]:
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        setting, hint = f"{prefix}.{field.name}", hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        section = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if section is not None:
            yield from _flags_of(section, setting)
            continue
        default: Any = None  # of a setting that its section requires
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        yield Flag(setting, default, choices)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser: its ``extra_args_provider``.

    Their defaults are left to the config file's schema, so that what was typed can be told from
    what was not.
    """
    group = parser.add_argument_group(title="pdm")
    for flag in flags():
        group.add_argument(
            *flag.options,
            dest=flag.dest,
            default=None,
            choices=flag.choices or None,
            help=f"{flag.setting} of the config file, default {flag.default!r}.",
        )
    group.add_argument(
        "--pdm-dry-run",
        action="store_true",
        help="Check the command line, print the config that it comes to, and start nothing.",
    )
    # Rollouts are exchanged on the host, whatever the model is on.
    parser.set_defaults(distributed_backend=GPU_BACKEND)
    # The loss returns sums and token counts; the gradient is divided by the count once.
    parser.set_defaults(calculate_per_token_loss=True)
    # The tokenizer is the engine's; the vocabulary is the checkpoint's.
    parser.set_defaults(tokenizer_type="NullTokenizer", vocab_size=1)
    # Without --eval-iters there is no evaluation; a resumed run divides by the interval all the
    # same (training.py:4532).
    parser.set_defaults(eval_iters=0, eval_interval=1000)
    parser.formatter_class = _HelpFormatter
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """Shows help with a plain per cent sign, which one of Megatron's flags has, as it stands."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except ValueError:
            return action.help or ""


def parse_arguments(
    prepare: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    check: Callable[[argparse.Namespace], None] = lambda args: None,
) -> argparse.Namespace:
    """Parse the command line, let Megatron validate it, and set Megatron's global variables.

    What ``parse_and_validate_args`` (arguments.py:87) does, with a check before Megatron's own: its
    assertions would come first, and name less.

    Args:
        prepare: may change the parser's defaults.
        check: may refuse what was parsed.

    Raises:
        UserError: a flag of Megatron's was typed that has no effect here, or the numbers do not
            make whole rollout batches and optimizer steps.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    unread: dict[str, Any] = {}

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_arguments(parser)
        unread.update({name: parser.get_default(name) for name in _WITHOUT_EFFECT})
        parser.set_defaults(**dict.fromkeys(_WITHOUT_EFFECT))
        prepare(parser)
        return parser

    args = parse_args(provide)
    for name, default in unread.items():
        if getattr(args, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} has no effect here: {_WITHOUT_EFFECT[name]}"
            )
        setattr(args, name, default)  # Megatron's own code still reads some of them
    _check_run(args)
    check(args)
    validate_args(args)
    set_global_variables(args)
    return args


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Return the run's config: validated arguments, checked like a config file.

    Raises:
        UserError: a flag that contradicts another one, or has no effect; whatever
            :func:`megatron.rl.config.parse_config` refuses.
    """
    tree = _tree_of_megatron(args)
    for flag in flags():
        typed = getattr(args, flag.dest)
        if typed is not None:
            _put(tree, flag.setting, yaml.safe_load(typed))
    config = parse_config(tree)
    _refuse_contradictions(args, config.loss)
    _check_refill(config.rollout)
    return config


def _check_run(args: argparse.Namespace) -> None:
    """Check what Megatron's assertions would say less about, or not at all."""
    samples = args.grpo_prompts_per_step * args.grpo_group_size
    if not args.perform_rl_step:
        raise UserError("--perform-rl-step is missing: this program trains on rollouts")
    if args.ckpt_step is not None:
        raise UserError(
            "--ckpt-step does not go with --perform-rl-step: Megatron looks for that step of the "
            "reference weights too (training.py:3408). Write the step into the checkpoint's "
            "latest_checkpointed_iteration.txt instead"
        )
    if not args.train_iters:
        raise UserError("--train-iters is missing: the number of optimizer steps")
    if args.context_parallel_size > 1:
        raise UserError(
            f"--context-parallel-size is {args.context_parallel_size}, expected 1: Megatron then "
            "builds a second model to sample from (training.py:1250). Use pdm-rl train"
        )
    if not args.global_batch_size or args.global_batch_size % args.grpo_group_size:
        raise UserError(
            f"--global-batch-size is {args.global_batch_size}, expected a multiple of "
            f"--grpo-group-size ({args.grpo_group_size}): groups stay whole in an optimizer step"
        )
    if args.distributed_backend == "nccl":
        raise UserError(
            f"--distributed-backend is nccl, expected {GPU_BACKEND}, the default here: rollouts "
            "are exchanged on the host. Leave it out"
        )
    if samples % args.global_batch_size:
        raise UserError(
            f"--global-batch-size is {args.global_batch_size}, which does not divide a rollout "
            f"batch of --grpo-prompts-per-step x --grpo-group-size = {samples} sequences"
        )
    steps = args.grpo_iterations * samples // args.global_batch_size
    if args.eval_iters and args.eval_interval % steps:
        raise UserError(
            f"--eval-interval is {args.eval_interval}, expected a multiple of {steps}, the "
            "iterations on a rollout batch: engines get the weights that a whole batch led to"
        )


def answer_for_a_gpu() -> None:
    """Let Megatron validate the arguments of a GPU run where there is none: for a dry run only.

    arguments.py:1339 and 1414 ask the GPU what it is; the answer here is a Hopper GPU.
    TransformerConfig (transformer_config.py:2185) asks for a kernel of Transformer Engine's.
    """
    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.training import arguments

    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = NotImplemented

    if not torch.cuda.is_available():
        arguments.get_device_arch_version = lambda: _HOPPER[0]
        torch.cuda.get_device_capability = lambda device=None: _HOPPER  # type: ignore[assignment]


def _tree_of_megatron(args: argparse.Namespace) -> dict[str, Any]:
    samples = args.grpo_prompts_per_step * args.grpo_group_size
    steps = args.grpo_iterations * samples // args.global_batch_size
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    return {
        "run": {"seed": args.seed, "export": False},
        "model": {"dtype": "bfloat16" if args.bf16 else "float32", **_fp8_of_megatron(args)},
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "data": args.world_size // (tensor * pipeline),
            "expert": args.expert_model_parallel_size,
            "sequence": bool(args.sequence_parallel) and tensor > 1,
            "virtual": args.virtual_pipeline_model_parallel_size,
            "first_stage_layers": args.decoder_first_pipeline_num_layers,
            "last_stage_layers": args.decoder_last_pipeline_num_layers,
        },
        "rollout": {
            "prompts": args.grpo_prompts_per_step,
            "group_size": args.grpo_group_size,
            "temperature": args.rl_default_temperature,
            # Megatron's 0 and -1 mean that nothing is cut off.
            "top_p": args.rl_default_top_p or 1.0,
            "top_k": max(args.rl_default_top_k, 0),
        },
        "train": {
            "rollouts": -(-args.train_iters // steps),
            "minibatch_prompts": args.global_batch_size // args.grpo_group_size,
            "epochs": args.grpo_iterations,
            "micro_batch_tokens": args.micro_batch_size * args.seq_length,
            "learning_rate": args.lr,
            "clip_grad": args.clip_grad,
        },
        "eval": {"prompts": args.rl_prompts_per_eval},
    }


def _fp8_of_megatron(args: argparse.Namespace) -> dict[str, Any]:
    if not args.fp8:  # --fp8-format; without it Megatron does not look at the others
        return {}
    skips = args.first_last_layers_bf16
    return {
        "fp8": args.fp8_recipe,
        "fp8_format": args.fp8,
        "fp8_params": args.fp8_param_gather,
        "fp8_skip_first": args.num_layers_at_start_in_bf16 if skips else 0,
        "fp8_skip_last": args.num_layers_at_end_in_bf16 if skips else 0,
    }


def _put(tree: dict[str, Any], setting: str, value: Any) -> None:
    *sections, name = setting.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def _check_refill(rollout: RolloutConfig) -> None:
    if rollout.refill_rounds and rollout.refill_policy != "keep":
        raise UserError(
            f"--pdm-rollout-refill-policy is {rollout.refill_policy}, expected keep with "
            "--pdm-rollout-refill-rounds: Megatron counts on as many iterations for every rollout "
            "batch. Use pdm-rl train for smaller ones"
        )


def _refuse_contradictions(args: argparse.Namespace, loss: PolicyLossConfig) -> None:
    for name, masks in _READ_BY_MASKS.items():
        if getattr(args, f"pdm_{name}") is not None and loss.mask not in masks:
            raise UserError(
                f"--pdm-{name.replace('_', '-')} has no effect with --pdm-mask {loss.mask}: only "
                f"the mask {' or '.join(masks)} reads it. Leave one of them out"
            )
    if args.pdm_kl_estimator is not None and loss.kl_coefficient == 0:
        raise UserError("--pdm-kl-estimator has no effect with --pdm-kl-coefficient 0")
    if args.pdm_fixed_length is not None and loss.fixed_length is None:
        raise UserError("--pdm-fixed-length is null; leave it out")
