# SPDX-License-Identifier: Apache-2.0
"""The names that ``megatron.training`` 0.19 imports from ``megatron.rl.rl_profiling``.

See ``megatron.rl.rl_utils``: they exist, and say that they are not built.
"""

from typing import Any, NoReturn

# training.py:2656 adds these to the timers that it logs; there are none yet.
RL_LOGGABLE_TIMER_NAMES: list[str] = []


def _not_built(name: str) -> NoReturn:
    raise NotImplementedError(
        f"megatron.rl.rl_profiling.{name} is not built: Megatron's pretrain() with "
        "--perform-rl-step cannot run this project's loss yet. Use `pdm-rl train CONFIG` instead"
    )


def initialize_rl_profiler(*args: Any, **kwargs: Any) -> NoReturn:
    """Start the profiler (training.py:1405)."""
    _not_built("initialize_rl_profiler")


def log_iteration_profile(*args: Any, **kwargs: Any) -> NoReturn:
    """Log one iteration (training.py:2934)."""
    _not_built("log_iteration_profile")


def shutdown_rl_profiler(*args: Any, **kwargs: Any) -> NoReturn:
    """End the profiler (training.py:4131)."""
    _not_built("shutdown_rl_profiler")
