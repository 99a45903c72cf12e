# SPDX-License-Identifier: Apache-2.0
"""How far an evaluation is: a live bar on a terminal, now and then a line elsewhere."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from megatron.rl.progress_bar import ProgressBar

PLAIN_LINE_INTERVAL_S = 10.0


class EvalProgress:
    """Use as a context manager. Methods may be called from any thread.

    Args:
        problems: of all benchmarks.
        done: of these, found finished.
        clock: seconds; another one in tests.
    """

    def __init__(
        self,
        problems: int,
        done: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._problems = problems
        self._done = done
        self._done_before = done
        self._clock = clock
        self._started = clock()
        self._bench = ""
        self._tokens_per_s: float | None = None
        self._bar = ProgressBar(self._console, PLAIN_LINE_INTERVAL_S, clock)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._console.print(text, markup=False)

    def bench(self, name: str) -> None:
        """Another benchmark begins; the time before the first is not sampling."""
        if not self._bench:
            self._started = self._clock()
        self._bench = name
        self._draw()

    def engine(self, fields: Mapping[str, Any]) -> None:
        """Take the engine's own report; see `VLLMEngine`."""
        if fields["elapsed_s"] > 0:
            self._tokens_per_s = fields["tokens_done"] / fields["elapsed_s"]
        self._draw()

    def problem_done(self) -> None:
        """Count a problem."""
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        status = self._status(self._clock())
        self._bar.draw(self._bench, status, self._done, self._problems)

    def _status(self, now: float) -> str:
        parts = [f"{self._done}/{self._problems} problems"]
        if self._tokens_per_s is not None:
            parts.append(f"{self._tokens_per_s:,.0f} tokens/s")
        new = self._done - self._done_before
        if new:
            left_s = int((now - self._started) / new * (self._problems - self._done))
            parts.append(f"eta {left_s // 60}:{left_s % 60:02d}")
        return "  ".join(parts)
