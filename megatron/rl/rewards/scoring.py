# SPDX-License-Identifier: Apache-2.0
"""Rewards of a batch of responses: exactly one each, whatever the scorer does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.rl.rewards.task import Prompt, Task


@dataclass(frozen=True)
class RewardBatch:
    """The rewards of B responses, in their order.

    rewards      [B] float64, finite, in [0, 1]
    raised       responses whose scorer raised; their reward is 0
    invalid      responses whose score was no finite number in [0, 1]; their reward is 0
    first_error  what went wrong first, for the log; None when nothing did
    """

    rewards: npt.NDArray[np.float64]
    raised: int
    invalid: int
    first_error: str | None


def score_batch(task: Task, responses: Sequence[str], prompts: Sequence[Prompt]) -> RewardBatch:
    """Score ``responses[b]`` as an answer to ``prompts[b]``.

    A scorer that fails on one response costs that response its reward, and no other: a reward is
    written at its own place, never appended. Failures are counted, since a reward of 0 alone would
    hide a broken scorer behind a policy that seems not to learn.

    Raises:
        ValueError: the two sequences differ in length.
    """
    if len(responses) != len(prompts):
        raise ValueError(
            f"expected one prompt for each response, got {len(prompts)} prompts and "
            f"{len(responses)} responses; repeat a prompt for each response of its group"
        )
    rewards = np.zeros(len(responses), dtype=np.float64)
    raised = invalid = 0
    first_error: str | None = None
    for place, (response, prompt) in enumerate(zip(responses, prompts, strict=True)):
        try:
            score = task.reward(response, prompt)
        except Exception as error:
            raised += 1
            problem = f"raised {type(error).__name__}: {error}"
        else:
            value = _as_reward(score)
            if value is not None:
                rewards[place] = value
                continue
            invalid += 1
            problem = f"returned {score!r}, expected a finite number in [0, 1]"
        if first_error is None:
            first_error = f"{task.name} {problem} (response {place}, {response[:80]!r})"
    return RewardBatch(rewards, raised, invalid, first_error)


def _as_reward(score: object) -> float | None:
    try:
        value = float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and 0.0 <= value <= 1.0 else None
