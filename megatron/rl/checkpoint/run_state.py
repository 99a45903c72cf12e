# SPDX-License-Identifier: Apache-2.0
"""Where a run stands, in plain values: everything of a checkpoint that is not a tensor."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.rl.errors import UserError

# What JSON gives back as it got it. Integers have any length: numpy's generators have 128 bits.
type Plain = bool | int | float | str | list[Plain] | dict[str, Plain] | None


@dataclass(frozen=True)
class RunState:
    """The state of a run between two optimizer steps.

    Attributes:
        step: optimizer steps taken.
        rollout: rollout batches that are finished.
        epoch, epoch_step: position inside the batch that is being trained on: passes finished,
            and steps taken of the pass after them. Both 0 between two batches.
        policy_version: of the weights that the engines hold.
        config_digest: of the settings that the run was started with.
        metrics_bytes: length of metrics.jsonl; what was written later is repeated by the resumed
            run and has to be cut off first.
        prompts: ``PromptSource.state()``; the owners of all engines draw the same stream.
        minibatch_order: state of the generator that orders minibatches.
        best_score: highest held-out score so far; None before the first evaluation.
        counters: what the run counts over its whole length.
        further: whatever else the owner of the loop has to remember.
    """

    step: int
    rollout: int
    policy_version: int
    config_digest: str
    epoch: int = 0
    epoch_step: int = 0
    metrics_bytes: int = 0
    best_score: float | None = None
    prompts: Mapping[str, Plain] = field(default_factory=dict)
    minibatch_order: Mapping[str, Plain] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    further: Mapping[str, Plain] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as JSON that :meth:`from_json` reads back to an equal one.

        Raises:
            ValueError: a value that JSON has no exact form for, such as NaN or a numpy number.
        """
        return _exact_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, source: str) -> "RunState":
        """Undo :meth:`to_json`.

        Args:
            source: where the text is from, for errors.

        Raises:
            UserError: it is not a run state.
        """
        fields = read_object(text, source)
        known = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := fields.keys() - known.keys():
            raise UserError(
                f"{source} has an unknown field {min(unknown)}: it is of another version"
            )
        for name, f in known.items():
            required = f.default is dataclasses.MISSING and (
                f.default_factory is dataclasses.MISSING
            )
            if name not in fields and required:
                raise UserError(f"{source} lacks the field {name}")
            if name in fields and not _has_type(fields[name], f.type):
                raise UserError(f"{source}: {name} is {str(fields[name])[:60]!r}")
        return cls(**fields)


def read_file(path: Path) -> str:
    """Read one of the small files of a checkpoint.

    Raises:
        UserError: it is not there, or no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def read_object(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        UserError: it is none.
    """
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{source} is not a JSON object")
    return fields


def _exact_json(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, allow_nan=False)
    if json.loads(text) != fields:
        raise ValueError("expected plain values with text keys, which JSON gives back unchanged")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _has_type(value: object, hint: Any) -> bool:
    if isinstance(value, bool):
        return False
    if hint is int:
        return isinstance(value, int) and value >= 0
    if hint is str:
        return isinstance(value, str)
    if hint == float | None:
        return value is None or isinstance(value, int | float)
    if hint == Mapping[str, int]:
        return isinstance(value, dict) and all(type(count) is int for count in value.values())
    return isinstance(value, dict)
