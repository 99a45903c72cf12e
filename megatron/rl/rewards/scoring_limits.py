# SPDX-License-Identifier: Apache-2.0
"""What scoring may cost: a section of a run's configuration."""

import os
from dataclasses import dataclass

_FEWEST, _MOST = 2, 8


@dataclass(frozen=True)
class ScoringLimits:
    """Responses are scored in processes of their own, which are ended when they cost too much."""

    workers: int | None = None
    """Processes that score, beside each engine; by default a quarter of the cores, 2 to 8: with
    one, a response that hangs would hold up all others."""
    timeout_s: float = 5.0
    """Seconds until a response whose scorer has not returned gets the score 0. Scoring shares the
    cores with the engine and takes longer than alone."""
    memory_mib: int = 2048
    """What scoring a response may take, beyond what the task takes once it is loaded."""
    responses_per_worker: int = 1000
    """Scored by a process before it is replaced, which takes milliseconds: nothing that a scorer
    leaks adds up over a run."""
    start_timeout_s: float = 300.0
    """Seconds that loading the task may take."""

    def worker_count(self) -> int:
        """Return the number of processes, with the default settled."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0))
        return min(max(cores // 4, _FEWEST), _MOST)
