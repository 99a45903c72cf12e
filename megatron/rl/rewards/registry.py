# SPDX-License-Identifier: Apache-2.0
"""From the task section of a config to a task."""

import importlib
from collections.abc import Mapping
from typing import Any

from megatron.rl.errors import UserError
from megatron.rl.rewards.reasoning_gym_task import ReasoningGymTask
from megatron.rl.rewards.task import Task

_REASONING_GYM = "reasoning_gym/"


def make_task(name: str, params: Mapping[str, Any] | None = None, *, exact: bool = False) -> Task:
    """Return the task that `name` stands for.

    Args:
        name: ``reasoning_gym/<data set>``, or ``package.module:Class`` for a task of one's own,
            which is called with `params` as keywords.
        params: settings of the data set or of the class.
        exact: reward 1 for a full score and 0 otherwise; of reasoning_gym tasks only.

    Raises:
        UserError: no such task, or settings that it refuses.
    """
    if name.startswith(_REASONING_GYM):
        return ReasoningGymTask(name.removeprefix(_REASONING_GYM), params, exact=exact)
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise UserError(
            f"task.name: expected reasoning_gym/<data set> or package.module:Class, got {name!r}"
        )
    if exact:
        raise UserError(f"task.exact has no effect on {name}; remove it")
    try:
        task: Task = getattr(importlib.import_module(module_name), class_name)(**(params or {}))
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(f"task.name: {name} cannot be made: {error}") from error
    return task
