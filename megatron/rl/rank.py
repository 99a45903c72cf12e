# SPDX-License-Identifier: Apache-2.0
"""One rank of a run: the process that the launcher, torchrun or Slurm starts."""

import ctypes
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatron.rl.config import Config, load_config
from megatron.rl.errors import UserError
from megatron.rl.events import EventSink
from megatron.rl.model.fp8 import fp8_settings, set_scales_environment
from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.run_folder import CONFIG_NAME, OpenRun, how_to_continue
from megatron.rl.stop_request import Preempted, StopRequest

if TYPE_CHECKING:
    from megatron.rl.trainer import Ending

# Stopped by SIGTERM in a run without checkpoints, as a program that does not handle it.
EXIT_UNSAVED = 128 + signal.SIGTERM
ALLOW_CHANGED = "--allow-changed"
MAX_REASON = 1500  # characters
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class RankTask:
    """What a rank is started for.

    Attributes:
        open_folder: opens the run's folder; called on rank 0, after all ranks have joined.
        allow_changed: see :class:`~megatron.rl.trainer.Trainer`.
    """

    config: Config
    open_folder: Callable[[], OpenRun]
    allow_changed: bool = False


def run_rank(task: RankTask, events: EventSink, stop: StopRequest) -> int:
    """Run this rank to the end; return its exit code. Errors are reported through ``events``.

    0: the run has ended, or was stopped and saved. :data:`EXIT_UNSAVED`: stopped without a
    checkpoint. 1: it failed. 2: the user has something to mend.
    """
    folder: list[Path] = []  # once it is known
    try:
        return EXIT_UNSAVED if _train(task, events, stop, folder) == "unsaved" else 0
    except Preempted:
        if os.environ["RANK"] == "0":
            events.send("note", message="stopped before anything new was trained")
        return 0
    except (UserError, EngineConfigError) as error:
        events.send("error", message=str(error), exit_code=2)
        return 2
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        after = f" (logs: {folder[0] / 'logs'}); {how_to_continue(folder[0])}" if folder else ""
        reason = f"{type(error).__name__}: {str(error)[:MAX_REASON]}"
        message = f"rank {os.environ['RANK']}: {reason}{after}"
        events.send("error", message=message, exit_code=1)
        return 1


def _train(
    task: RankTask, events: EventSink, stop: StopRequest, known_folder: list[Path]
) -> "Ending":
    config = task.config
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
    from megatron.rl.checkpoint.agreement import from_rank_0
    from megatron.rl.parallel import build_groups, join_ranks, leave_ranks
    from megatron.rl.trainer import Trainer

    with stop.interrupting():
        join_ranks(config.parallel, backend)
    opened: list[OpenRun] = []  # its lock is held by rank 0

    def open_folder() -> tuple[Path, str | None]:
        opened.append(task.open_folder())
        return opened[0].path, opened[0].finished

    folder, finished = from_rank_0(open_folder)
    if finished is not None:
        if os.environ["RANK"] == "0":
            events.send("done", message=finished)
        leave_ranks()
        return "finished"
    known_folder.append(folder)
    build_groups(config.parallel, config.run.seed)
    ending = Trainer(config, folder, events, stop, allow_changed=task.allow_changed).run()
    leave_ranks()
    return ending


def _end_with_parent() -> None:
    """Have the kernel kill this process when the launcher dies, even by SIGKILL."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _exit_on_sigint() -> None:
    """How the launcher ends what is left of a run, without saving."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGINT, leave)


def main() -> int:
    """Entry point of ``python -m megatron.rl.rank RUN_FOLDER``, which the launcher runs."""
    _end_with_parent()
    _exit_on_sigint()
    stop = StopRequest()
    stop.listen()
    folder = Path(sys.argv[1])
    allow_changed = ALLOW_CHANGED in sys.argv[2:]
    config = load_config(folder / CONFIG_NAME)
    # The launcher has opened it, and this process has inherited the lock.
    task = RankTask(config, lambda: OpenRun(folder), allow_changed)
    return run_rank(task, EventSink(int(os.environ["RANK"])), stop)


if __name__ == "__main__":
    sys.exit(main())
