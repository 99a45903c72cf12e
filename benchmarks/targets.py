# SPDX-License-Identifier: Apache-2.0
"""The lines of a benchmark's ``--check``: `name value target ok|short`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A measured value and the limit that it should keep."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        sign, verdict = (">=" if self.at_least else "<="), ("ok" if self.met else "short")
        return f"{self.name} {self.value:.4g} {sign}{self.limit:g} {verdict}"


def as_json(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Return what the JSON file says of them."""
    return [dataclasses.asdict(target) | {"met": target.met} for target in targets]
