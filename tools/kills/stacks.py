# SPDX-License-Identifier: Apache-2.0
"""What a process was doing when it was killed, from the stacks that it dumps a moment before.

``faulthandler`` writes the stacks from inside the signal's handler, whatever the process is at, so
that the answer is what really was interrupted and not what the killer had aimed at.
"""

import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SIGNAL = signal.SIGUSR2
FOLDER_VARIABLE = "PDM_RL_STACKS"
START_UP = "start-up"
# A process that is not scheduled for so long is killed without an answer.
ANSWER_LIMIT_S = 2.0

_FRAME = re.compile(r'^  File ".*?([^/"]+/[^/"]+)\.py", line \d+ in (\S+)', re.MULTILINE)
# Frames that tell what the main thread is at; of those in a stack, the first here counts.
_PHASES = {
    ("rl/trainer", "_set_up"): "restoring",
    ("rl/trainer", "_export"): "export",
    ("rl/trainer", "_summarize"): "end",
    ("rl/parallel", "leave_ranks"): "end",
    ("checkpoint/writer", "save"): "save",
    ("checkpoint/writer", "collect"): "save",
    ("checkpoint/writer", "finish"): "save",
    ("rl/trainer", "_save"): "save",
    ("rl/trainer", "_evaluate"): "evaluation",
    ("rl/rollout_session", "collect"): "rollout",
    ("rl/rollout_session", "plan_epoch"): "rollout",
    ("rl/rollout_session", "finish_batch"): "weight sync",
    ("rl/trainer", "_take_step"): "optimizer step",
    ("rl/trainer", "_train"): "between phases",
}
_SITE = """import os
if os.environ.get("{variable}"):
    from tools.kills.stacks import answer
    answer()
"""


@dataclass(frozen=True)
class Activity:
    """What a process is at.

    Attributes:
        phase: of the main thread.
        saving: another thread writes a checkpoint meanwhile.
    """

    phase: str
    saving: bool = False


def answer() -> None:
    """Dump this process's stacks, from now on, whenever it gets :data:`SIGNAL`."""
    path = Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())
    faulthandler.register(SIGNAL, path.open("ab", buffering=0), all_threads=True)


def site_folder(folder: Path) -> Path:
    """Make a folder that, on PYTHONPATH, has every Python process :func:`answer`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE.format(variable=FOLDER_VARIABLE))
    return folder


def ask(process: psutil.Process, folder: Path) -> Activity:
    """Return what a process is at."""
    path = folder / str(process.pid)
    if not path.exists():
        return Activity(START_UP)
    before = path.stat().st_size
    process.send_signal(SIGNAL)
    deadline = time.monotonic() + ANSWER_LIMIT_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.001)
        now = path.stat().st_size
        if now > before and now == size:  # it has stopped to grow
            break
        size = now
    with path.open("rb") as file:
        file.seek(before)
        return activity_of(file.read().decode(errors="replace"))


def activity_of(dump: str) -> Activity:
    """Return what a dump of all stacks shows."""
    stacks = [_FRAME.findall(stack) for stack in re.split(r"\n(?=Thread|Current thread)", dump)]
    save = ("checkpoint/writer", "do")
    saving = any(save in stack and ("rl/trainer", "_save") not in stack for stack in stacks)
    for frame, phase in _PHASES.items():
        if any(frame in stack for stack in stacks):
            return Activity(phase, saving)
    return Activity(START_UP, saving)
