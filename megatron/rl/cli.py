# SPDX-License-Identifier: Apache-2.0
"""The command line: ``pdm-rl``."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron.rl.data.prepare_command import add_data_commands
from megatron.rl.errors import UserError
from megatron.rl.evaluation.command import add_eval
from megatron.rl.rollout.errors import EngineConfigError
from pdm_rl.doctor.command import add_doctor

if TYPE_CHECKING:
    from megatron.rl.config import Config
    from megatron.rl.rank import RankTask
    from megatron.rl.run_folder import OpenRun

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
    _add_config_arguments(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the resolved config and the processes, start nothing",
    )
    train.add_argument(
        "--run-folder",
        metavar="DIR",
        help="train in exactly this folder; a run of these settings that is there is continued",
    )
    _add_allow_changed(train)
    train.set_defaults(command=_train)
    resume = commands.add_parser("resume", help="continue a run from its newest checkpoint")
    resume.add_argument("run", help="its folder")
    _add_allow_changed(resume)
    resume.set_defaults(command=_resume)
    _add_show(commands)
    _add_plan(commands)
    _add_export(commands)
    add_eval(commands)
    add_data_commands(commands)
    add_doctor(commands)
    return parser


def _add_allow_changed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-changed",
        action="store_true",
        help="continue a run although settings differ that decide what is trained",
    )


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file of settings")
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        metavar="FILE",
        dest="presets",
        help="merge another YAML file over it, a mask or a cluster; may be repeated, later wins",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one setting, for example loss.direction=exact; may be repeated",
    )


def _add_show(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    show = commands.add_parser("show", help="print resolved settings, one a line, for scripts")
    _add_config_arguments(show)
    show.add_argument("keys", nargs="+", metavar="KEY", help="for example parallel.world_size")
    show.set_defaults(command=_show)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser(
        "plan", help="memory, traffic and time of a config on a cluster, without running it"
    )
    _add_config_arguments(plan)
    plan.add_argument("--gpus", type=int, metavar="N", help="GPUs of the cluster (default: needed)")
    plan.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="of each GPU (default: that of --gpu)"
    )
    plan.add_argument("--gpu", help="h20, h100 or h200 (default: the nearest to --gpu-memory)")
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    plan.add_argument(
        "--rates", metavar="FILE", help="YAML of hardware rates and assumptions that differ"
    )
    plan.add_argument(
        "--model-config", metavar="FILE", help="a config.json, where model.path has none here"
    )
    plan.add_argument(
        "--response-tokens", type=int, metavar="N",
        help="expected mean response length (default: half of rollout.max_response_tokens)",
    )  # fmt: skip
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(command=_plan)


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser("export", help="write a policy for serving, in BF16 or FP8")
    export.add_argument("source", help="a run folder, or a Hugging Face checkpoint folder")
    export.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    export.add_argument(
        "--format",
        default="bf16",
        help="bf16 (default), float32, block_fp8, or modelopt:NAME, for example modelopt:fp8",
    )
    export.add_argument(
        "--scales",
        choices=("power_of_two", "float32"),
        help="of block_fp8: rounded up to powers of two (default), or exact",
    )
    export.add_argument(
        "--modelopt-python",
        metavar="PATH",
        help="the interpreter of an environment with nvidia-modelopt",
    )
    export.add_argument(
        "--calibration",
        metavar="FILE",
        help="for modelopt: one text, or one JSON list of token ids, a line",
    )
    export.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    export.set_defaults(command=_export)


def _train(options: argparse.Namespace) -> int:
    from megatron.rl.config import dump_config, load_config
    from megatron.rl.rollout.from_config import describe_processes

    config = _with_device(load_config(options.config, options.overrides, options.presets))
    if options.dry_run:
        print(dump_config(config), end="")
        print(describe_processes(config))
        return 0
    folder = None if options.run_folder is None else Path(options.run_folder)
    if options.allow_changed and folder is None:
        raise UserError("--allow-changed has no effect without --run-folder; leave it out")
    return _run(config, folder, options.allow_changed)


def _resume(options: argparse.Namespace) -> int:
    from megatron.rl.config import load_config
    from megatron.rl.run_folder import CONFIG_NAME

    folder = Path(options.run)
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"expected the folder of a run, found no {CONFIG_NAME} in {folder}")
    return _run(_with_device(load_config(folder / CONFIG_NAME)), folder, options.allow_changed)


def _run(config: "Config", folder: Path | None, allow_changed: bool) -> int:
    """Train in a new folder, or in the given one."""
    from megatron.rl.run_checks import require_runnable
    from megatron.rl.run_folder import new_run_folder, open_run_folder

    def open_folder() -> "OpenRun":
        if folder is None:
            return new_run_folder(config)
        return open_run_folder(folder, config, allow_changed=allow_changed)

    require_runnable(config)
    if "RANK" in os.environ:
        from megatron.rl.rank import RankTask

        return _train_under_torchrun(RankTask(config, open_folder, allow_changed))
    from megatron.rl.launch import launch

    run = open_folder()
    if run.finished is not None:
        print(run.finished)
        return 0
    return launch(config, run, allow_changed=allow_changed)


def _show(options: argparse.Namespace) -> int:
    from megatron.rl.config import load_config
    from megatron.rl.config_values import show_value

    config = _with_device(load_config(options.config, options.overrides, options.presets))
    print("\n".join([show_value(config, key) for key in options.keys]))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from megatron.rl.planning.command import run_plan

    return run_plan(options)


def _export(options: argparse.Namespace) -> int:
    from megatron.rl.weights.export import (
        MODELOPT_PREFIX,
        export_checkpoint,
        find_checkpoint,
        tensor_format,
    )
    from megatron.rl.weights.modelopt_handover import ModeloptFailed, export_with_modelopt

    out = Path(options.out)
    modelopt = options.format.startswith(MODELOPT_PREFIX)
    for option in () if modelopt else ("modelopt_python", "calibration"):
        if getattr(options, option) is not None:
            raise UserError(
                f"--{option.replace('_', '-')} has no effect with --format {options.format}; "
                "leave it out"
            )
    if not modelopt:
        fmt = tensor_format(options.format, options.scales)
        done = export_checkpoint(find_checkpoint(options.source), out, fmt, force=options.force)
        for note in done.notes:
            print(f"note: {note}", file=sys.stderr)
        print(f"{out}: {done.tensors} tensors, {done.nbytes / 1e6:,.1f} MB, {options.format}")
        return 0
    if options.scales is not None:
        raise UserError("--scales has no effect with modelopt; leave it out")
    try:
        export_with_modelopt(
            find_checkpoint(options.source),
            out,
            options.format.removeprefix(MODELOPT_PREFIX),
            python=options.modelopt_python,
            calibration=options.calibration,
            force=options.force,
        )
    except ModeloptFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {options.format}")
    return 0


def _with_device(config: "Config") -> "Config":
    """Settle ``run.device: auto``."""
    if config.run.device != "auto":
        return config
    import torch

    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, device=device))


def _train_under_torchrun(task: "RankTask") -> int:
    """Be one rank among those that torchrun or Slurm started; rank 0 draws."""
    from megatron.rl.display import Display
    from megatron.rl.events import EventSink
    from megatron.rl.rank import run_rank
    from megatron.rl.stop_request import StopRequest

    stop = StopRequest()
    stop.listen()
    rank = int(os.environ["RANK"])
    if rank != 0:
        return run_rank(task, EventSink(rank), stop)
    with Display() as display:
        return run_rank(task, EventSink(rank, display.draw), stop)


if __name__ == "__main__":
    sys.exit(main())
