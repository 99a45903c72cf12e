# SPDX-License-Identifier: Apache-2.0
"""What ``pdm-rl data prepare`` shows: how far it is, and what it kept and dropped."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from megatron.rl.data.problem_filter import DROP_REASONS

PLAIN_LINE_INTERVAL_S = 5.0


def print_card(card: dict[str, Any], out: Path) -> None:
    """Print the table of rows read, dropped and kept."""
    counts = card["counts"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{counts['rows']:,}", "rows read")
    for reason, count in counts["dropped"].items():
        table.add_row(f"-{count:,}", DROP_REASONS[reason])
    table.add_row(f"{counts['kept']:,}", "problems kept")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"{out}: train.parquet, card.json, README.md", markup=False)


class PrepareProgress:
    """A bar on a terminal; elsewhere a plain line from time to time. On standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> "PrepareProgress":
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:,}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None)
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

    def draw(self, what: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` rows or problems have been seen; None: nobody knows."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_LINE_INTERVAL_S:
            self._last_line = now
            of = "" if total is None else f" of {total:,}"
            self._console.print(f"{what}: {done:,}{of}", markup=False)
