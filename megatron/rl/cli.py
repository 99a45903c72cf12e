# SPDX-License-Identifier: Apache-2.0
"""The command line: ``pdm-rl``."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron.rl.errors import UserError
from megatron.rl.rollout.errors import EngineConfigError

if TYPE_CHECKING:
    from megatron.rl.config import Config

EXIT_USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``pdm-rl``; return its exit code: 0, 1 for a failure, 2 for the user's mistakes."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (UserError, EngineConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdm-rl",
        description="Reinforcement learning on Megatron-Core with predictive divergence masks.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a config file")
    train.add_argument("config", help="YAML file of settings")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one setting, for example loss.direction=exact; may be repeated",
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the resolved config and the processes, start nothing",
    )
    train.set_defaults(command=_train)
    return parser


def _train(options: argparse.Namespace) -> int:
    from megatron.rl.config import dump_config, load_config

    config = _with_device(load_config(options.config, options.overrides))
    if options.dry_run:
        print(dump_config(config), end="")
        print(_describe_processes(config))
        return 0
    _check_model(config)
    if "RANK" in os.environ:
        return _train_under_torchrun(config)
    from megatron.rl.launch import launch
    from megatron.rl.run_folder import create_run_folder

    return launch(config, create_run_folder(config))


def _with_device(config: "Config") -> "Config":
    """Settle ``run.device: auto``."""
    if config.run.device != "auto":
        return config
    import torch

    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, device=device))


def _check_model(config: "Config") -> None:
    """Check all that needs the model folder, before any process starts."""
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.rewards.registry import make_task
    from megatron.rl.rollout.engine_config import check_model
    from megatron.rl.rollout.from_config import engine_config
    from megatron.rl.weights.hf_files import HFTensors

    architecture = read_architecture(config.model.path)
    config.parallel.check(architecture)
    with HFTensors(config.model.path):
        pass
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if longest > architecture.max_positions:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens is {longest}, the model has "
            f"{architecture.max_positions} positions"
        )
    check_model(engine_config(config, Path(config.run.folder)))
    make_task(config.task.name, config.task.params, exact=config.task.exact)


def _describe_processes(config: "Config") -> str:
    layout = config.parallel
    return (
        f"# {layout.world_size} trainer ranks on {config.run.device}: tensor {layout.tensor} x "
        f"pipeline {layout.pipeline} x context {layout.context} x data {layout.data}, expert "
        f"{layout.expert}, sequence parallelism {'on' if layout.sequence_parallel else 'off'}\n"
        f"# 1 vLLM engine beside rank 0, {config.rollout.dtype} precision "
        f"(model: {config.model.dtype})"
    )


def _train_under_torchrun(config: "Config") -> int:
    """Be one rank among those that torchrun or Slurm started; rank 0 draws."""
    from megatron.rl.display import Display
    from megatron.rl.events import EventSink
    from megatron.rl.rank import run_rank
    from megatron.rl.run_folder import create_run_folder

    rank = int(os.environ["RANK"])
    if rank != 0:
        return run_rank(config, Path(config.run.folder), EventSink(rank))
    with Display() as display:
        folder = create_run_folder(config)
        (folder / "logs").mkdir()
        return run_rank(config, folder, EventSink(rank, display.draw))


if __name__ == "__main__":
    sys.exit(main())
