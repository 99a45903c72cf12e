# SPDX-License-Identifier: Apache-2.0
"""What ``megatron.training`` 0.19 calls of ``megatron.rl`` for ``--rl-profile``: phase times.

``rl_profile_<run id>.jsonl`` in the profile folder has one object a logged interval (``kind:
interval``) and one at the end (``kind: total``), of rank 0. Imported like ``rl_utils``: nothing of
Megatron is imported here.
"""

import json
from pathlib import Path
from typing import Any, TextIO

# Timers of a rollout batch, which training.py:2656 adds to those it logs: weights to the engines
# and their proof, sampling and scoring, planning and moving of sequences, packing.
RL_LOGGABLE_TIMER_NAMES: list[str] = ["rl/weights", "rl/rollout", "rl/exchange", "rl/packing"]

TIMER_LEVEL = 0  # timed at every --timing-log-level

# Megatron's own phases of an iteration. It times them from --timing-log-level 1 on.
_MEGATRON_TIMERS = ("forward-backward", "optimizer")
_MEGATRON_LEVEL = 1

_profiler: "_Profiler | None" = None


class _Profiler:
    """Writes what each timer has run since the last call."""

    def __init__(self, file: TextIO | None, levels: dict[str, int]) -> None:
        self._file = file
        self._levels = levels
        self._seen: dict[str, float] = {}
        self._intervals = 0

    def interval(self, timers: Any, fields: dict[str, Any]) -> dict[str, float]:
        """Write an interval; return milliseconds by phase."""
        phases = {}
        for name, level in self._levels.items():
            total = 1000.0 * timers(name, log_level=level).active_time()  # which is never reset
            phases[name] = total - self._seen.get(name, 0.0)
            self._seen[name] = total
        self._intervals += 1
        self._write({"kind": "interval", **fields, "phases_ms": phases})
        return phases

    def close(self) -> None:
        self._write({"kind": "total", "intervals": self._intervals, "phases_ms": self._seen})
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


def initialize_rl_profiler(
    *,
    output_dir: str,
    run_id: str,
    enabled: bool,
    log_to_wandb: bool,
    log_to_tensorboard: bool,
) -> None:
    """Start the profiler (training.py:1405), on every rank; rank 0 has the file.

    Args:
        output_dir: is made.
        run_id: names the file.
        log_to_wandb, log_to_tensorboard: the writers are passed to each call below; not read.
    """
    global _profiler
    if not enabled:
        return
    import torch.distributed as dist
    from megatron.training import get_args

    levels = dict.fromkeys(RL_LOGGABLE_TIMER_NAMES, TIMER_LEVEL)
    if get_args().timing_log_level >= _MEGATRON_LEVEL:
        levels |= dict.fromkeys(_MEGATRON_TIMERS, _MEGATRON_LEVEL)
    file = None
    if dist.get_rank() == 0:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"rl_profile_{run_id}.jsonl").open("a", buffering=1)
    _profiler = _Profiler(file, levels)


def log_iteration_profile(
    *,
    iteration: int,
    timers: Any,
    elapsed_time_ms: float,
    throughput_tflops: float | None,
    global_batch_size: int,
    wandb_writer: Any,
    tb_writer: Any,
) -> None:
    """Write how long each phase took since the call before (training.py:2934).

    Args:
        timers: Megatron's.
        elapsed_time_ms: an iteration, as Megatron logs it.
        throughput_tflops: None without ``--log-throughput``.
    """
    if _profiler is None:
        return
    fields = {
        "iteration": iteration,
        "elapsed_ms": elapsed_time_ms,
        "throughput_tflops": throughput_tflops,
        "global_batch_size": global_batch_size,
    }
    phases = _profiler.interval(timers, fields)
    scalars = {f"rl-profile/{name}_ms": value for name, value in phases.items()}
    if tb_writer:
        for name, value in scalars.items():
            tb_writer.add_scalar(name, value, iteration)
    if wandb_writer:
        wandb_writer.log(scalars, iteration)


def shutdown_rl_profiler() -> None:
    """Write the totals and close the file (training.py:4131)."""
    global _profiler
    if _profiler is not None:
        _profiler.close()
        _profiler = None
