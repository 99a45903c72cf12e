# SPDX-License-Identifier: Apache-2.0
"""What a config needs of this machine's files, checked before any process starts.

Each check is one subject, so that ``pdm-rl doctor`` tells of all that is missing where ``pdm-rl
train`` stops at the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.rl.errors import UserError

if TYPE_CHECKING:
    from megatron.rl.config import Config


@dataclass(frozen=True)
class RunCheck:
    """One subject; `check` raises UserError or EngineConfigError for what has to be mended."""

    subject: str
    check: "Callable[[Config], None]"


def require_runnable(config: "Config") -> None:
    """Do all checks.

    Raises:
        UserError, EngineConfigError: the first that fails.
    """
    for one in RUN_CHECKS:
        one.check(config)


def _model(config: "Config") -> None:
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.rollout.from_config import longest_sequence
    from megatron.rl.weights.hf_files import HFTensors

    architecture = read_architecture(config.model.path)
    config.parallel.check(architecture)
    with HFTensors(config.model.path):
        pass
    longest = longest_sequence(config)
    if longest > architecture.max_positions:
        raise UserError(
            f"rollout.max_prompt_tokens + max_response_tokens (or eval's, where it is larger) is "
            f"{longest}, the model has {architecture.max_positions} positions"
        )


def _rollouts(config: "Config") -> None:
    from megatron.rl.rollout.client.engine_config import check_model
    from megatron.rl.rollout.from_config import engine_config, run_topology
    from megatron.rl.rollout.records.record_folder import RecordFolder

    topology = run_topology(config)
    if config.rollout.replay_from is not None:
        RecordFolder(config.rollout.replay_from)
    else:
        check_model(engine_config(config, Path(config.run.folder), topology.engines[0]))


def _task(config: "Config") -> None:
    from megatron.rl.rewards.registry import make_task, task_spec

    make_task(task_spec(config.task))


def _benchmarks(config: "Config") -> None:
    from megatron.rl.evaluation.in_training import run_benches

    run_benches(config)


RUN_CHECKS = (
    RunCheck("model", _model),
    RunCheck("rollouts", _rollouts),
    RunCheck("task", _task),
    RunCheck("benchmarks", _benchmarks),
)
