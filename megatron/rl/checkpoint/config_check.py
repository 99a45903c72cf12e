# SPDX-License-Identifier: Apache-2.0
"""Which values of ``checkpoint`` are refused: out of range, or without effect."""

from typing import TYPE_CHECKING

from megatron.rl.errors import UserError

if TYPE_CHECKING:
    from megatron.rl.config import Config


def check_checkpoint(config: "Config") -> None:
    """Raise UserError for the first setting that is out of range or has no effect."""
    settings = config.checkpoint
    if settings.every < 0:
        raise UserError(
            f"checkpoint.every: expected rollout batches, or 0 for never, got {settings.every}"
        )
    if settings.keep < 1:
        raise UserError(f"checkpoint.keep: expected at least 1, got {settings.keep}")
    if not 0 <= settings.min_free_gib < float("inf"):
        raise UserError(f"checkpoint.min_free_gib: expected 0 or more, got {settings.min_free_gib}")
    if settings.keep_best and not (settings.every and config.eval.every):
        raise UserError(
            "checkpoint.keep_best: expected false: it has no effect unless checkpoint.every and "
            "eval.every are above 0, got true"
        )
