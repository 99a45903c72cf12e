# SPDX-License-Identifier: Apache-2.0
"""Settings of ``checkpoint`` that cannot work, or would do nothing, are refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.rl.config import parse_config
from megatron.rl.errors import UserError

BASE: dict[str, Any] = {"model": {"path": "m"}, "task": {"name": "reasoning_gym/basic_arithmetic"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": -1}, "checkpoint.every"),
        ({"keep": 0}, "checkpoint.keep"),
        ({"min_free_gib": -0.5}, "checkpoint.min_free_gib"),
        ({"min_free_gib": float("nan")}, "checkpoint.min_free_gib"),
        ({"keep_best": True}, "checkpoint.keep_best.*eval.every"),
        ({"interval": 3}, "unknown setting checkpoint.interval"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config(BASE | {"checkpoint": settings})


def test_best_needs_evaluations() -> None:
    tree = BASE | {"checkpoint": {"keep_best": True, "every": 5}, "eval": {"every": 5}}
    assert parse_config(tree).checkpoint.keep_best
    with pytest.raises(UserError, match=r"checkpoint\.keep_best"):
        parse_config(tree | {"checkpoint": {"keep_best": True, "every": 0}})
