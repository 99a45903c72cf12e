# SPDX-License-Identifier: Apache-2.0
"""How far something is: a live bar on a terminal, now and then a plain line elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class ProgressBar:
    """Use as a context manager.

    Args:
        console: where it is drawn.
        interval_s: between two plain lines.
        clock: seconds; another one in tests.
    """

    def __init__(
        self, console: Console, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._interval_s = interval_s
        self._clock = clock
        self._last_line = clock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[status]}"),
                console=console,
                refresh_per_second=4,
                transient=True,  # what stays is the result, not the bar
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def draw(
        self, what: str, status: str, done: int, total: int | None, *, now: bool = False
    ) -> None:
        """Show that ``done`` of ``total`` is behind us; None: nobody knows how much there is.

        Args:
            now: a plain line must not wait for its turn.
        """
        if self._bar is not None:
            self._bar.update(
                self._current(), description=what, completed=done, total=total, status=status
            )
        elif now or self._clock() - self._last_line >= self._interval_s:
            self._last_line = self._clock()
            self._console.print(f"{what}  {status}", markup=False)

    def phase(self, name: str) -> None:
        """Name what happens meanwhile; the bar stays where it is."""
        if self._bar is not None:
            self._bar.update(self._current(), description=name)
        else:
            self._console.print(name, markup=False)

    def _current(self) -> TaskID:
        assert self._bar is not None
        if self._task is None:
            self._task = self._bar.add_task("", total=None, status="")
        return self._task
