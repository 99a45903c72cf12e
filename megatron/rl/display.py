# SPDX-License-Identifier: Apache-2.0
"""Draw a run's events: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console

from megatron.rl.events import Event
from megatron.rl.progress_bar import ProgressBar

PLAIN_LINE_INTERVAL_S = 5.0


class Display:
    """Use as a context manager; call :meth:`draw` with each event."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = ProgressBar(self._console, PLAIN_LINE_INTERVAL_S)
        self._started: float | None = None
        self._first_rollout = 0

    def __enter__(self) -> "Display":
        self._bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def draw(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "progress":
            self._draw_progress(event)
        elif kind == "phase":
            self._bar.phase(event["name"])
        elif kind in ("note", "done"):
            self._console.print(event["message"], markup=False)
        elif kind == "error":
            sys.stdout.flush()
            Console(stderr=True, highlight=False, soft_wrap=True).print(
                f"error: {event['message']}", markup=False
            )

    def _draw_progress(self, event: Event) -> None:
        rollout, rollouts = event["rollout"], event["rollouts"]
        now = time.monotonic()
        first = self._started is None
        if self._started is None:
            self._started, self._first_rollout = now, rollout
        status = _status(event["metrics"], self._eta_s(rollout, rollouts, now))
        self._bar.draw(
            f"rollout {rollout}/{rollouts}",
            status,
            rollout,
            rollouts,
            now=first or rollout == rollouts,
        )

    def _eta_s(self, rollout: int, rollouts: int, now: float) -> float | None:
        done = rollout - self._first_rollout
        if self._started is None or done <= 0:
            return None
        return (now - self._started) / done * (rollouts - rollout)


def _status(metrics: dict[str, Any], eta_s: float | None) -> str:
    parts = [
        f"reward {metrics['reward']:.3f}",
        f"kl {metrics['ppo_kl']:.4f}",
        f"vetoed {metrics['clip_fraction'] * 100:.2f} %",
        f"{metrics['tokens_per_s']:.0f} tokens/s",
    ]
    if eta_s is not None:
        parts.append(f"eta {int(eta_s) // 60}:{int(eta_s) % 60:02d}")
    return "  ".join(parts)
