# SPDX-License-Identifier: Apache-2.0
"""The random number generators of one rank, as JSON.

Restored exactly where the layout is the same. In another layout no rank of the checkpoint
corresponds to one here: the generators stay as the seed of the run has set them.
"""

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron.rl.checkpoint.run_state import read_object
from megatron.rl.errors import UserError


def random_state_json() -> str:
    """Return the state of Python's, numpy's, torch's and Megatron's generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert not isinstance(keys, str)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
        "megatron": {name: _encode(s) for name, s in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return json.dumps(state)


def restore_random_state(text: str, source: str) -> None:
    """Undo :func:`random_state_json`.

    Args:
        source: where the text is from, for errors.

    Raises:
        UserError: it is no such state.
    """
    state = read_object(text, source)
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(state["torch"]))
        if "cuda" in state and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(_decode(state["cuda"]))
        megatron = {name: _decode(encoded) for name, encoded in state["megatron"].items()}
        get_cuda_rng_tracker().set_states(megatron)
    # numpy and random say in many ways that these are no numbers of theirs.
    except (
        LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError
    ) as error:  # fmt: skip
        raise UserError(f"{source} is no state of random number generators: {error}") from None


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
