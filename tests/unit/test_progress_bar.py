# SPDX-License-Identifier: Apache-2.0
"""How far something is, on a terminal and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from megatron.rl.progress_bar import ProgressBar


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def shown(at: Console) -> str:
    assert isinstance(at.file, io.StringIO)
    return at.file.getvalue()


def test_plain_lines_keep_their_distance_but_for_those_that_must_not_wait() -> None:
    seconds, plain = [0.0], console(terminal=False)
    with ProgressBar(plain, interval_s=5.0, clock=lambda: seconds[0]) as bar:
        for seconds[0], now in (
            (1.0, False),
            (5.0, False),
            (9.0, False),
            (9.5, True),
            (14.4, False),
        ):
            bar.draw("rows", f"{seconds[0]} s", 1, None, now=now)
        bar.phase("sorting [them]")
    assert shown(plain) == "rows  5.0 s\nrows  9.5 s\nsorting [them]\n"


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    terminal = console(terminal=True)
    with ProgressBar(terminal, interval_s=0.0) as bar:
        bar.phase("starting")
        bar.draw("rollout 3/4", "reward 0.5", 3, 4)
    assert "rollout 3/4" in shown(terminal) and "reward 0.5" in shown(terminal)
    assert "starting" not in shown(terminal).rsplit("rollout 3/4", 1)[1]
    assert shown(terminal).endswith("\x1b[2K")  # the line is erased
