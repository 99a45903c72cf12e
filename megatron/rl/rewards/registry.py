# SPDX-License-Identifier: Apache-2.0
"""From the task section of a config to a task."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.rl.errors import UserError
from megatron.rl.rewards.own_reward import OwnReward
from megatron.rl.rewards.reasoning_gym_task import ReasoningGymTask
from megatron.rl.rewards.task import Task

if TYPE_CHECKING:
    from megatron.rl.config import TaskConfig

_REASONING_GYM = "reasoning_gym/"
# Names of the project's own tasks, loaded when they are asked for.
_BUILT_IN = {"math": "megatron.rl.rewards.math_task:MathTask"}


@dataclass(frozen=True)
class TaskSpec:
    """All it takes to make a task, in this process or in another one.

    name    ``reasoning_gym/<data set>``, ``math``, or ``package.module:Class`` for a task of one's
            own, which is called with `params` as keywords
    params  settings of the data set or of the class
    exact   reward 1 for a full score and 0 otherwise; of reasoning_gym tasks only
    reward  ``package.module:function`` that scores instead of the task's own rule
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    reward: str | None = None


def task_spec(task: "TaskConfig") -> TaskSpec:
    """Return what the task section of a config asks for."""
    return TaskSpec(task.name, task.params, task.exact, task.reward)


def make_task(spec: TaskSpec) -> Task:
    """Return the task that `spec` describes.

    Raises:
        UserError: no such task or reward function, or settings that it refuses.
    """
    task = _make(spec)
    if spec.reward is None:
        return task
    if spec.exact:
        raise UserError("task.exact has no effect with task.reward; remove one of them")
    function = _import(spec.reward, "task.reward", "package.module:function")
    if not callable(function):
        raise UserError(f"task.reward: {spec.reward} is {function!r}, expected a function")
    return OwnReward(task, function)


def _make(spec: TaskSpec) -> Task:
    if spec.name.startswith(_REASONING_GYM):
        name = spec.name.removeprefix(_REASONING_GYM)
        return ReasoningGymTask(name, spec.params, exact=spec.exact)
    path = _BUILT_IN.get(spec.name, spec.name)
    if ":" not in path:
        raise UserError(
            f"task.name: expected reasoning_gym/<data set>, {', '.join(_BUILT_IN)} or "
            f"package.module:Class, got {spec.name!r}"
        )
    if spec.exact:
        raise UserError(f"task.exact has no effect on {spec.name}; remove it")
    made = _import(path, "task.name", "package.module:Class")
    try:
        task: Task = made(**spec.params)
    except UserError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"task.name: {spec.name} cannot be made: {problem}") from error
    return task


def _import(path: str, setting: str, expected: str) -> Any:
    """Return the object that ``module:name`` names; whatever its module raises is the user's."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{setting}: expected {expected}, got {path!r}")
    try:
        return getattr(importlib.import_module(module_name), name)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{setting}: {path} cannot be imported: {problem}") from error
