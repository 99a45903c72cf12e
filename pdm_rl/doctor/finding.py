# SPDX-License-Identifier: Apache-2.0
"""One line of what ``pdm-rl doctor`` found."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "error"]
"""``note``: works, but somebody may care. ``error``: training, or the given config, cannot run."""


@dataclass(frozen=True)
class Finding:
    """What was found about one subject."""

    level: Level
    subject: str
    text: str

    def line(self) -> str:
        """Return it as one line."""
        return f"{self.level:5} {self.subject}: {' '.join(self.text.split())}"


def error_unless(good: bool, subject: str, text: str) -> Finding:
    """Return a finding that is ok or an error."""
    return Finding("ok" if good else "error", subject, text)


def note_unless(good: bool, subject: str, text: str) -> Finding:
    """Return a finding that is ok or a note."""
    return Finding("ok" if good else "note", subject, text)
