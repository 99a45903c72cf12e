# SPDX-License-Identifier: Apache-2.0
"""Single values of a resolved config, for ``pdm-rl show`` and the scripts that read it."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from megatron.rl.config import Config
from megatron.rl.errors import UserError


def show_value(config: Config, key: str) -> str:
    """Return the value of a dotted key, on one line: text as it is, anything else as JSON.

    Besides settings, what follows from them can be named: ``parallel.world_size``. A section is an
    object of all its settings.

    Raises:
        UserError: no such key; the message names what is there.
    """
    value: Any = config
    path = ""
    for name in key.split("."):
        names = _names(value)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"known: {', '.join(names)}" if names else f"{path[:-1]} is a value"
            hint = f"did you mean {path}{near[0]}?" if near else hint
            raise UserError(f"unknown setting {key}; {hint}")
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        path += f"{name}."
    if isinstance(value, str) and "\n" not in value:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.dumps(value)


def _names(value: Any) -> list[str]:
    """What may follow a dot: fields, and properties that are computed from them."""
    if isinstance(value, Mapping):
        return [str(name) for name in value]
    if not dataclasses.is_dataclass(value):
        return []
    properties = [name for name, p in vars(type(value)).items() if isinstance(p, property)]
    return [f.name for f in dataclasses.fields(value)] + properties
