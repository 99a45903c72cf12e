# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed: a reader of input that others wrote, and how it may answer."""

import random
from pathlib import Path
from typing import Protocol


class Target(Protocol):
    """One reader. A fault is any exception out of :meth:`attempt`, and one that takes too long.

    Attributes:
        name: of the command line.
        limit_s: what one input may take.
    """

    name: str
    limit_s: float

    def prepare(self, folder: Path) -> None:
        """Make good input in the folder and show that the reader takes it.

        From then on nothing outside of the folder can be written.
        """

    def attempt(self, rng: random.Random) -> bool:
        """Make one input, give it to the reader; return whether it was accepted.

        Raises:
            Exception: the reader let out what no user should see, or its answer is wrong.
        """

    def close(self) -> None:
        """End processes, if there are any."""


class WrongAnswer(Exception):
    """The reader answered, but not as it promises."""
