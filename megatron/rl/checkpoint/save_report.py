# SPDX-License-Identifier: Apache-2.0
"""What became of a checkpoint that was to be saved, and what it cost."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that was published, or the reason why not.

    Attributes:
        step: optimizer steps of the run.
        path: of the checkpoint; None when it failed.
        error: why it failed; None when it did not. The checkpoints before it are untouched.
        nbytes: of all its files.
        blocked_s: seconds that training waited on this rank.
        write_s: seconds that the slowest rank wrote, in the background or not.
    """

    step: int
    path: Path | None
    error: str | None
    nbytes: int
    blocked_s: float
    write_s: float

    def metrics(self) -> dict[str, float]:
        """Return it under the names of ``metrics.jsonl``."""
        return {
            "checkpoint/failed": float(self.error is not None),
            "checkpoint/bytes": self.nbytes,
            "checkpoint/blocked_s": self.blocked_s,
            "checkpoint/write_s": self.write_s,
        }

    def message(self) -> str | None:
        """Return what the user has to know, if anything."""
        if self.error is None:
            return None
        return f"no checkpoint at step {self.step}, training goes on: {self.error}"
