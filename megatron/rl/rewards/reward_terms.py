# SPDX-License-Identifier: Apache-2.0
"""What is added to a task's score before advantages are computed: overlong, format and length.

A *score* is the task's judgement of a response, in [0, 1]. The *reward* is the score plus the terms
that a run turns on, each of them 0 or negative. Evaluations report scores, never rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.rl.errors import UserError
from megatron.rl.rewards.task import Task


@dataclass(frozen=True)
class RewardConfig:
    """Terms that are added to a task's score. All are off by default."""

    overlong_buffer_tokens: int = 0
    """The last tokens before rollout.max_response_tokens, over which a penalty grows linearly from
    0 to overlong_penalty; 0: no such penalty."""
    overlong_penalty: float = 1.0
    """Subtracted at rollout.max_response_tokens."""
    format_penalty: float = 0.0
    """Subtracted where the task finds no answer in the response."""
    length_penalty: float = 0.0
    """Subtracted at rollout.max_response_tokens, and in proportion from shorter responses."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that are on."""
        on = {
            "overlong": self.overlong_buffer_tokens > 0,
            "format": self.format_penalty > 0,
            "length": self.length_penalty > 0,
        }
        return tuple(name for name, is_on in on.items() if is_on)


@dataclass(frozen=True)
class ShapedRewards:
    """The rewards of B responses.

    scores  [B] float64 in [0, 1], the task's
    terms   name -> [B] float64, 0 or negative; only those that are on
    """

    scores: NDArray[np.float64]
    terms: Mapping[str, NDArray[np.float64]]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Score plus terms, [B] float64; without terms the scores themselves."""
        total = self.scores
        for term in self.terms.values():
            total = total + term
        return total

    def select(self, sequences: NDArray[np.integer]) -> "ShapedRewards":
        """Those of some responses, in this order."""
        terms = {name: term[sequences] for name, term in self.terms.items()}
        return ShapedRewards(self.scores[sequences], terms)

    @classmethod
    def join(cls, parts: "Sequence[ShapedRewards]") -> "ShapedRewards":
        """Those of all parts, one after the other; at least one part, all with the same terms."""
        terms = {
            name: np.concatenate([part.terms[name] for part in parts]) for name in parts[0].terms
        }
        return cls(np.concatenate([part.scores for part in parts]), terms)


def require_answers(config: RewardConfig, task: Task) -> None:
    """Refuse the format term for a task that extracts no answers.

    Raises:
        UserError: ``reward.format_penalty`` would have no effect.
    """
    if "format" in config.terms and not callable(getattr(task, "answer", None)):
        raise UserError(
            f"reward.format_penalty is {config.format_penalty}, expected 0: task {task.name} has "
            "no method answer(response_text), so that a response without an answer is not known"
        )


def shape_rewards(
    config: RewardConfig,
    scores: NDArray[np.float64],
    answers: Sequence[str | None],
    lengths: NDArray[np.integer],
    max_tokens: int,
) -> ShapedRewards:
    """Compute the terms that are on.

    - ``overlong``: ``overlong_penalty`` times :func:`soft_overlong`
    - ``format``: ``-format_penalty`` where the answer is None
    - ``length``: ``-length_penalty * lengths / max_tokens``, the linear term of L1 (Aggarwal and
      Welleck, 2025, LCPO) with a target of no tokens, in units of the longest response

    Args:
        scores: [B] float64.
        answers: of B responses, what the task extracted.
        lengths: [B] response tokens, the one that ended a response included.
        max_tokens: the longest response allowed.
    """
    terms: dict[str, NDArray[np.float64]] = {}
    if "overlong" in config.terms:
        penalty = soft_overlong(lengths, max_tokens, config.overlong_buffer_tokens)
        terms["overlong"] = config.overlong_penalty * penalty
    if "format" in config.terms:
        missing = np.array([answer is None for answer in answers], dtype=np.bool_)
        terms["format"] = np.where(missing, -config.format_penalty, 0.0)
    if "length" in config.terms:
        terms["length"] = -config.length_penalty * lengths / max_tokens
    return ShapedRewards(scores, terms)


def soft_overlong(
    lengths: NDArray[np.integer], max_tokens: int, buffer_tokens: int
) -> NDArray[np.float64]:
    """Return DAPO's soft punishment of long responses, [B] float64 in [-1, 0].

        0                                 n <= max - buffer
        ((max - buffer) - n) / buffer     max - buffer < n <= max
        -1                                n > max

    Args:
        lengths: n, [B] response tokens.
        max_tokens: L_max, the longest response allowed.
        buffer_tokens: L_cache, 1 to ``max_tokens``.

    Source: Yu et al., 2025 (DAPO, arXiv 2503.14476), Eq. 13.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"expected a buffer of 1 to {max_tokens} tokens, got {buffer_tokens}")
    free = max_tokens - buffer_tokens
    over = np.clip(np.asarray(lengths) - free, 0, buffer_tokens)
    return np.asarray(-over / buffer_tokens + 0.0, dtype=np.float64)
