# SPDX-License-Identifier: Apache-2.0
"""JSON in the payload of a message: the names of a large model exceed a frame's header."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray


def json_array(value: Any) -> NDArray[np.uint8]:
    """The value as JSON, as an array of bytes."""
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), dtype=np.uint8)


def read_json_array(array: NDArray[np.uint8]) -> Any:
    """Undo :func:`json_array`."""
    return json.loads(array.tobytes())
