# SPDX-License-Identifier: Apache-2.0
"""A scoring process: restricted for good, then one response after the other until its end.

It is forked from the process of :mod:`~megatron.rl.rewards.scoring_server`, which has loaded the
task, so that a new one is there within milliseconds.
"""

import ctypes
import gc
import os
import pickle
import signal
from typing import NoReturn

from megatron.rl.rewards import sandbox
from megatron.rl.rewards.score import Outcome, Score, score_response
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_wire import Request, pack_result, read_request
from megatron.rl.rewards.task import Task

# Exit statuses that the pool gives a reason for.
OUT_OF_MEMORY_STATUS = 71

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16
_FIRST_VICTIM = "1000"  # of the kernel, when the machine runs out of memory


def run_worker(task: Task, limits: ScoringLimits, requests: int, results: int) -> NoReturn:
    """Serve requests from one pipe and answer on the other; a forked process calls it and ends.

    Args:
        requests: descriptor to read from.
        results: descriptor to write to.
    """
    status = 1
    try:
        enter_worker(limits)
        _serve(task, limits, requests, results)
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY_STATUS
    finally:
        # No farewell: what a response has left behind must not run now.
        os._exit(status)


def enter_worker(limits: ScoringLimits) -> sandbox.SandboxReport:
    """Cut the calling process, forked a moment ago, off from everything but its pipes."""
    parent = os.getppid()
    os.setsid()
    die_with_parent(True)
    if os.getppid() != parent:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_FIRST_VICTIM)
    except OSError:
        pass  # a container may hide it; the memory limit stands
    return sandbox.enter(limits.memory_mib << 20)


def die_with_parent(die: bool) -> None:
    """Have the kernel end this process when the thread that started it ends, or no longer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if die else 0, 0, 0, 0)


def _serve(task: Task, limits: ScoringLimits, requests: int, results: int) -> None:
    gc.collect()
    with open(requests, "rb", buffering=_READ_BYTES, closefd=False) as stream:
        while (request := read_request(stream)) is not None:
            sandbox.limit_cpu_time(limits.timeout_s)
            answer = memoryview(pack_result(request.ticket, _score(task, request)))
            while answer:
                answer = answer[os.write(results, answer) :]


def _score(task: Task, request: Request) -> Score:
    try:
        # Anew for each response: a scorer that changes its entry changes it for this one only.
        prompt = pickle.loads(request.prompt)
    except MemoryError:
        raise
    except Exception as error:
        problem = f"cannot read its prompt: {type(error).__name__}: {error}"
        return Score(0.0, Outcome.RAISED, problem=problem)
    return score_response(task, request.response, prompt)
