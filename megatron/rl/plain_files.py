# SPDX-License-Identifier: Apache-2.0
"""JSON and YAML files that somebody else wrote: what cannot be read is refused in one line."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from megatron.rl.errors import UserError

MAX_REASON_CHARS = 300
MAX_OPEN_BRACKETS = 100
"""Of a YAML text at one place: PyYAML takes a time that grows with the square of them."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        UserError: the file cannot be read, is no JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # A ValueError is bad JSON, no UTF-8, or a number of more digits than Python takes.
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values.

    Raises:
        UserError: the file cannot be read, or is no such YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {_one_line(error)}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML of plain values: no tag makes any other object, and nothing contains itself.

    Args:
        source: where the text is from, for errors.

    Raises:
        UserError: it is no such YAML.
    """
    if _open_brackets(text) > MAX_OPEN_BRACKETS:
        raise UserError(f"{source}: more than {MAX_OPEN_BRACKETS} brackets are open at once")
    try:
        content = yaml.safe_load(text)
        # An anchor may stand for what it is inside of: nothing that walks the tree would end.
        json.dumps(content, default=str, skipkeys=True)
    # A ValueError is a date that does not exist, a number too long, or such a circle. For a tag
    # whose text is none of its kind (!!timestamp x, !!bool x) PyYAML raises all sorts of errors.
    except (
        yaml.YAMLError, ValueError, RecursionError, AttributeError, LookupError, TypeError
    ) as error:  # fmt: skip
        raise UserError(f"{source} is not valid YAML: {_one_line(error)}") from None
    return content


def _open_brackets(text: str) -> int:
    """Count the brackets that are open at once, those inside of quotes too."""
    most = now = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        now = now + 1 if bracket in "[{" else max(now - 1, 0)
        most = max(most, now)
    return most


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]
