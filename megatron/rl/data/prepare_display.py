# SPDX-License-Identifier: Apache-2.0
"""What ``pdm-rl data prepare`` shows: how far it is, and what it kept and dropped."""

from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron.rl.data.problem_filter import DROP_REASONS
from megatron.rl.progress_bar import ProgressBar

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
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = ProgressBar(console, PLAIN_LINE_INTERVAL_S)

    def __enter__(self) -> "PrepareProgress":
        self._bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def draw(self, what: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` rows or problems have been seen; None: nobody knows."""
        of = "" if total is None else f" of {total:,}"
        self._bar.draw(what, f"{done:,}{of}", done, total)
