# SPDX-License-Identifier: Apache-2.0
"""vLLM's log-probs kept as arrays where they arise, for vLLM 0.32.

Its `FlatLogprobs` appends K + 1 Python numbers to each of four lists for every token: at K = 20
about 5 us and, while the sequence runs, some 1,700 bytes a token. The replacement copies the two
rows that the sampler returned into growing arrays: 168 bytes, and no Python object a token.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST_ROWS = 64
_INSTALLED_MARK = "_keeps_rows"


class LogprobRows:
    """One sequence's K + 1 ids and log-probs per token, the sampled token first."""

    def __init__(self) -> None:
        self._count = 0
        self._ids: NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
        self._values: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)

    def __len__(self) -> int:
        return self._count

    def extend(self, ids: NDArray[np.int32], values: NDArray[np.float32], width: int) -> None:
        """Append the rows of new tokens; what vLLM pads beyond `width` columns is left out."""
        count = self._count + len(ids)
        if count > len(self._ids):
            rows = max(2 * len(self._ids), count, _FIRST_ROWS)
            self._ids = _grown(self._ids, self._count, rows, width)
            self._values = _grown(self._values, self._count, rows, width)
        self._ids[self._count : count] = ids[:, :width]
        self._values[self._count : count] = values[:, :width]
        self._count = count

    @property
    def ids(self) -> NDArray[np.int32]:
        """All ids [T, K + 1], as a view."""
        return self._ids[: self._count]

    @property
    def values(self) -> NDArray[np.float32]:
        """All log-probs [T, K + 1], as a view."""
        return self._values[: self._count]


def _grown(old: NDArray[Any], used: int, rows: int, width: int) -> NDArray[Any]:
    new = np.empty((rows, width), dtype=old.dtype)
    if used:
        new[:used] = old[:used]
    return new


def install_logprob_rows() -> None:
    """Have requests with `flat_logprobs` collect `LogprobRows`; raise if vLLM is another one."""
    from vllm.v1.engine import logprobs as module

    processor = module.LogprobsProcessor
    create = getattr(module, "create_sample_logprobs", None)
    update = getattr(processor, "_update_sample_logprobs", None)
    if create is None or update is None:
        raise RuntimeError(
            "this vLLM has no create_sample_logprobs or LogprobsProcessor._update_sample_logprobs: "
            "logprob_rows is for vLLM 0.32"
        )
    if getattr(update, _INSTALLED_MARK, False):
        return

    @functools.wraps(create)
    def create_sample_logprobs(flat_logprobs: bool) -> Any:
        return LogprobRows() if flat_logprobs else create(flat_logprobs)

    @functools.wraps(update)
    def update_sample_logprobs(self: Any, lists: Any) -> None:
        if isinstance(self.logprobs, LogprobRows):
            width = self.num_logprobs + 1
            self.logprobs.extend(lists.logprob_token_ids, lists.logprobs, width)
        else:
            update(self, lists)

    setattr(update_sample_logprobs, _INSTALLED_MARK, True)
    module.create_sample_logprobs = create_sample_logprobs
    processor._update_sample_logprobs = update_sample_logprobs
