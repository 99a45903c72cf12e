# SPDX-License-Identifier: Apache-2.0
"""The section ``eval`` of a run: what it asks of benchmarks, and what it may not ask."""

from typing import TYPE_CHECKING

from megatron.rl.errors import UserError
from megatron.rl.evaluation.settings import EvalSampling

if TYPE_CHECKING:
    from megatron.rl.config import Config


def bench_sampling(config: "Config") -> EvalSampling:
    """Return how a run samples its benchmarks.

    Raises:
        UserError: out of range, or without effect.
    """
    section = config.eval
    try:
        return EvalSampling(
            samples=section.samples,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            max_tokens=section.response_limit(config.rollout),
            seed=config.run.seed,
        )
    except UserError as error:
        raise UserError(f"eval.{error}") from None


def check_eval(config: "Config") -> None:
    """Raise UserError for a setting of evaluation that is out of range or has no effect."""
    section = config.eval
    if not section.benches:
        for name, off in (("data", None), ("samples", 16), ("problems", None)):
            if getattr(section, name) != off:
                raise UserError(
                    f"eval.{name}: expected {off}, got {getattr(section, name)!r}: it has no "
                    "effect without eval.benches"
                )
        return
    if config.rollout.engine == "replay":
        raise UserError(
            "eval.benches: expected none with rollout.engine replay, which has recorded rollouts "
            f"and no model, got {section.benches!r}"
        )
    if section.data is not None and isinstance(section.benches, dict):
        raise UserError(
            "eval.data has no effect where eval.benches gives the file of each; leave it out"
        )
    bench_sampling(config)
