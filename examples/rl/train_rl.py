# SPDX-License-Identifier: Apache-2.0
"""Train a policy with Megatron's own loop: ``pretrain()`` with ``--perform-rl-step``.

    torchrun --nproc-per-node 8 examples/rl/train_rl.py --perform-rl-step \\
        --pdm-model-path MODEL --pdm-task-name reasoning_gym/NAME --pdm-mask divergence ...

Everything of Megatron's is said in Megatron's arguments, everything of the loss, the rollouts and
the weight bridge in ``--pdm-*``: ``--help`` lists both. Beside this file, ``megatron_args_tiny.sh``
runs on two CPU cores, and ``megatron_args_qwen3_30b.sh`` is a whole command line. Without a GPU add
``--pdm-device cpu``; ``--pdm-dry-run`` checks and starts nothing.
"""

import sys
import warnings


def main() -> None:
    """Parse Megatron's command line and train."""
    warnings.filterwarnings("ignore")  # of libraries, about each other
    # Before anything imports Megatron: the CPU backend replaces what Megatron reads at import.
    device = _device(sys.argv)
    if device == "cpu":
        from megatron.rl import cpu_training

        cpu_training.install()
    from megatron.rl import megatron_arguments, megatron_pretrain
    from megatron.rl.model.architecture import read_architecture

    dry_run = "--pdm-dry-run" in sys.argv
    if device == "cpu":
        args = megatron_arguments.parse_arguments(
            cpu_training.set_defaults, cpu_training.refuse_cuda_only
        )
    else:
        if dry_run:
            megatron_arguments.answer_for_a_gpu()
        args = megatron_arguments.parse_arguments()
    args.pdm_run_device = device
    config = megatron_arguments.config_from_arguments(args)
    architecture = read_architecture(config.model.path)
    container = megatron_pretrain.pretrain_config(args, config, architecture)
    if dry_run:
        from megatron.rl.config import dump_config
        from megatron.rl.rollout.from_config import describe_processes

        print(f"{dump_config(config)}{describe_processes(config)}")
        return
    _pretrain(container, config, architecture.vocab_size)


def _pretrain(container, config, vocab_size: int) -> None:  # type: ignore[no-untyped-def]
    import torch
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron.rl import megatron_pretrain, stock_session
    from megatron.rl.parallel import leave_ranks
    from megatron.rl.policy.from_config import policy_head

    megatron_pretrain.use_prebuilt_helpers()
    joined_already = torch.distributed.is_initialized()
    try:
        pretrain(
            container,
            _no_data_set,
            ModelType.encoder_or_decoder,
            megatron_pretrain.make_forward_step(policy_head(config, vocab_size)),
        )
    finally:
        stock_session.close()  # Megatron ends the engines itself, unless something was raised
    if not joined_already:
        leave_ranks()


def _no_data_set(num_samples: object, vp_stage: int | None = None) -> None:
    """Stand for Megatron's data set provider: training.py:4553 asks none with --perform-rl-step.

    Only its parameters are looked at, for ``vp_stage`` (training.py:1347).
    """


def _device(arguments: list[str]) -> str:
    """Return what ``--pdm-device`` comes to; it is needed before Megatron's parser exists."""
    import torch

    options = ("--pdm-device", "--pdm-run-device")
    asked = "auto"
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, attached = option.partition("=")
        if name in options:
            asked = attached if equals else value
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def _report_and_exit() -> None:
    from megatron.rl.errors import UserError
    from megatron.rl.rollout.errors import EngineConfigError

    try:
        main()
    except (UserError, EngineConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    _report_and_exit()
