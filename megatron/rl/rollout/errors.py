# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a rollout engine, as exceptions that a caller can tell apart.

Two families. What the user or the caller asked for cannot be done: these are also `ValueError`,
so that a command line can exit with status 2, and the engine is as usable as before. The engine
itself failed: these carry the path of its log and say what to do.
"""


class EngineError(RuntimeError):
    """Anything that a rollout engine raises."""


class EngineConfigError(EngineError, ValueError):
    """The engine cannot be built as configured (K above the limit, no weights, ...)."""


class EngineRequestError(EngineError, ValueError):
    """A request that the engine refuses; it did nothing and can take the next one."""


class WeightNamesError(EngineRequestError):
    """An update whose tensors are not exactly the checkpoint's; nothing was loaded."""


class WeightsMismatch(EngineError):
    """After an update the engine does not hold, or does not compute with, the trainer's weights."""


class WeightsLost(EngineError):
    """The engine has no complete set of weights: the last update failed, or cannot be repeated."""


class RolloutDataError(EngineError, ValueError):
    """Arrays that cannot be rollouts (NaN, lengths that disagree, ids out of range)."""


class EngineStartError(EngineError):
    """The engine process did not become ready."""


class EngineDied(EngineError):
    """The engine process ended, and the restarts that were allowed are used up."""


class EngineTimeout(EngineError):
    """The engine process is alive but reported nothing for longer than allowed."""
