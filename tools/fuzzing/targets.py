# SPDX-License-Identifier: Apache-2.0
"""The targets by name, each loaded when it is asked for: some need seconds to import."""

import importlib
from collections.abc import Callable
from typing import cast

from tools.fuzzing.target import Target

_PLACES = {
    "config": "configs:Configs",
    "record": "records:Records",
    "checkpoint": "checkpoints:Checkpoints",
    "reward": "rewards:Rewards",
    "hf_config": "model_folders:ModelFolders",
    "problem": "problem_files:ProblemFiles",
}
# Of the inputs, where all targets run. A config or a checkpoint takes ten times as long as others.
SHARES = {"config": 5, "record": 20, "checkpoint": 5, "reward": 25, "hf_config": 25, "problem": 20}


def _loader(place: str) -> Callable[[], Target]:
    def load() -> Target:
        module, _, name = place.partition(":")
        return cast(Target, getattr(importlib.import_module(f"tools.fuzzing.{module}"), name)())

    return load


TARGETS = {name: _loader(place) for name, place in _PLACES.items()}
