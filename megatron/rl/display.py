# SPDX-License-Identifier: Apache-2.0
"""Draw a run's events: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from megatron.rl.events import Event

PLAIN_LINE_INTERVAL_S = 5.0


class Display:
    """Use as a context manager; call :meth:`draw` with each event."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._started: float | None = None
        self._first_rollout = 0
        self._last_line = 0.0

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                refresh_per_second=4,
                transient=True,  # the last line is the result, not the bar
            )
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def draw(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "progress":
            self._draw_progress(event)
        elif kind == "phase":
            self._draw_phase(event["name"])
        elif kind in ("note", "done"):
            self._console.print(event["message"], markup=False)
        elif kind == "error":
            sys.stdout.flush()
            Console(stderr=True, highlight=False, soft_wrap=True).print(
                f"error: {event['message']}", markup=False
            )

    def _draw_phase(self, name: str) -> None:
        if self._progress is None:
            self._console.print(name, markup=False)
        elif self._task is None:
            self._task = self._progress.add_task(name, total=None, status="")
        else:
            self._progress.update(self._task, description=name)

    def _draw_progress(self, event: Event) -> None:
        rollout, rollouts = event["rollout"], event["rollouts"]
        now = time.monotonic()
        if self._started is None:
            self._started, self._first_rollout = now, rollout
        status = _status(event["metrics"], self._eta_s(rollout, rollouts, now))
        if self._progress is not None:
            if self._task is None:
                self._task = self._progress.add_task("", total=rollouts, status="")
            self._progress.update(
                self._task,
                description=f"rollout {rollout}/{rollouts}",
                completed=rollout,
                total=rollouts,
                status=status,
            )
        elif now - self._last_line >= PLAIN_LINE_INTERVAL_S or rollout == rollouts:
            self._last_line = now
            self._console.print(f"rollout {rollout}/{rollouts}  {status}", markup=False)

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
