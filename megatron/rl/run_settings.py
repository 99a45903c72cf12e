# SPDX-License-Identifier: Apache-2.0
"""Which settings a run keeps when it continues, and which may differ.

May differ: where and how fast a run computes, what it measures, what it keeps, and a higher
``train.rollouts``. Everything else decides what is trained, and stays.
"""

import dataclasses
import hashlib
import json
from typing import Any

from megatron.rl.config import Config

# Sections, and settings of sections, that may differ.
FREE_SETTINGS = (
    "run.name",
    "run.folder",
    "run.device",
    "run.export",
    "scoring",
    "parallel",
    "rollout.max_num_seqs",
    "rollout.engines_per_node",
    "rollout.replay_from",
    "rollout.server_url",
    "rollout.server_token_variable",
    "rollout.server_allow_remote",
    "rollout.sleep",
    "rollout.python",
    "rollout.threads",
    "rollout.kv_cache_gib",
    "rollout.start_timeout_s",
    "rollout.stall_timeout_s",
    "rollout.max_restarts",
    "rollout.engine_args",
    "bridge.transport",
    "bridge.bucket_mib",
    "bridge.certificate",
    "bridge.probe_sequences",
    "bridge.probe_tokens",
    "bridge.probe_tolerance",
    "records",
    "train.rollouts",
    "train.micro_batch_tokens",
    "eval",
    "checkpoint",
)


@dataclasses.dataclass(frozen=True)
class ChangedSetting:
    """A setting that has another value than before."""

    name: str
    before: Any
    now: Any


def changed_settings(before: Config, now: Config) -> list[ChangedSetting]:
    """Return the settings that stay in a run and differ here, in the order of the config."""
    old, new = fixed_settings(before), fixed_settings(now)
    names = [*old, *(name for name in new if name not in old)]
    return [
        ChangedSetting(name, old.get(name), new.get(name))
        for name in names
        if old.get(name) != new.get(name)
    ]


def fixed_settings(config: Config) -> dict[str, Any]:
    """Return the settings that stay in a run, by their dotted names."""
    flat: dict[str, Any] = {}
    _flatten(dataclasses.asdict(config), "", flat)
    return {name: value for name, value in flat.items() if not _is_free(name)}


def settings_digest(config: Config) -> str:
    """Return a hash of the settings that stay in a run."""
    text = json.dumps(fixed_settings(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE_SETTINGS)


def _flatten(tree: dict[str, Any], prefix: str, flat: dict[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{key}.", flat)
        else:
            flat[f"{prefix}{key}"] = value
