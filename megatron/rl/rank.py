# SPDX-License-Identifier: Apache-2.0
"""One rank of a run: the process that the launcher, torchrun or Slurm starts."""

import ctypes
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType

from megatron.rl.config import Config, load_config
from megatron.rl.errors import UserError
from megatron.rl.events import EventSink
from megatron.rl.model.fp8 import fp8_settings, set_scales_environment
from megatron.rl.rollout.errors import EngineConfigError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_rank(config: Config, folder: Path, events: EventSink) -> int:
    """Run this rank to the end; return its exit code. Errors are reported through ``events``."""
    try:
        _train(config, folder, events)
    except (UserError, EngineConfigError) as error:
        events.send("error", message=str(error), exit_code=2)
        return 2
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        rank = os.environ["RANK"]
        events.send(
            "error",
            message=f"rank {rank}: {type(error).__name__}: {error} (logs: {folder / 'logs'})",
            exit_code=1,
        )
        return 1
    return 0


def _train(config: Config, folder: Path, events: EventSink) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if config.run.device == "cuda":
        set_scales_environment(fp8_settings(config))  # before Megatron imports Transformer Engine
    import torch

    if config.run.device == "cpu":
        from megatron.rl import cpu_backend

        cpu_backend.install()
        torch.set_num_threads(1)
        backend = "gloo"
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    from megatron.rl.parallel import build_groups, join_ranks, leave_ranks
    from megatron.rl.trainer import Trainer

    join_ranks(config.parallel, backend)
    build_groups(config.parallel, config.run.seed)
    Trainer(config, folder, events).run()
    leave_ranks()


def _end_with_parent() -> None:
    """Have the kernel kill this process when the launcher dies, even by SIGKILL."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _exit_on_sigterm() -> None:
    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def main() -> int:
    """Entry point of ``python -m megatron.rl.rank RUN_FOLDER``, which the launcher runs."""
    _end_with_parent()
    _exit_on_sigterm()
    folder = Path(sys.argv[1])
    events = EventSink(int(os.environ["RANK"]))
    return run_rank(load_config(folder / "config.yaml"), folder, events)


if __name__ == "__main__":
    sys.exit(main())
