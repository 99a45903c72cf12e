# SPDX-License-Identifier: Apache-2.0
"""How far a run has come, as the training loop counts it."""

from dataclasses import dataclass
from typing import Any

from megatron.rl.checkpoint.run_state import RunState
from megatron.rl.metrics_log import LogPosition
from megatron.rl.rollout_session import SessionState


@dataclass
class RunProgress:
    """Counters of the loop; the same on every rank.

    Attributes:
        step: optimizer steps taken.
        rollout: rollout batches finished.
        epoch, epoch_step: within the batch behind them: passes finished, steps taken of the next.
        vetoed, tokens: over all steps.
        evaluated: rollout batches before the newest evaluation; -1 before the first.
        first_score, score, best_score: held-out scores, of the start, the newest and the highest.
    """

    step: int = 0
    rollout: int = 0
    epoch: int = 0
    epoch_step: int = 0
    vetoed: int = 0
    tokens: int = 0
    evaluated: int = -1
    first_score: float = 0.0
    score: float = 0.0
    best_score: float | None = None

    def note_evaluation(self, score: float) -> None:
        """Count an evaluation of the policy as it is."""
        if self.evaluated < 0:
            self.first_score = score
        self.evaluated, self.score = self.rollout, score
        self.best_score = score if self.best_score is None else max(self.best_score, score)

    def to_run_state(self, session: SessionState, digest: str, *, pending: bool) -> RunState:
        """Return what a checkpoint holds; ``pending``: with the batch that was sampled last."""
        return RunState(
            step=self.step,
            rollout=self.rollout,
            policy_version=self.rollout,
            config_digest=digest,
            epoch=self.epoch,
            epoch_step=self.epoch_step,
            metrics_bytes=session.log.metrics_bytes,
            best_score=self.best_score,
            prompts=session.prompts,
            minibatch_order=session.minibatch_order,
            counters={"vetoed": self.vetoed, "tokens": self.tokens, "evaluated": self.evaluated},
            further={
                "first_score": self.first_score,
                "score": self.score,
                "pending": pending,
                "event_bytes": dict(session.log.event_bytes),
            },
        )

    @classmethod
    def from_run_state(cls, run: RunState) -> "RunProgress":
        """Undo :meth:`to_run_state`."""
        further: Any = run.further
        return cls(
            step=run.step,
            rollout=run.rollout,
            epoch=run.epoch,
            epoch_step=run.epoch_step,
            best_score=run.best_score,
            first_score=further["first_score"],
            score=further["score"],
            **run.counters,
        )


def log_position(run: RunState) -> LogPosition:
    """Return where the logs stood."""
    further: Any = run.further
    return LogPosition(run.metrics_bytes, further["event_bytes"])
