# SPDX-License-Identifier: Apache-2.0
"""A faster top-K for vLLM 0.32's sampler on CPU; a repair of speed, not of results.

For 64 tokens of a 151,936-token vocabulary, vLLM's `Sampler.gather_logprobs` spends on one core
16 ms in `torch.topk` and 65 ms in counting how many log-probs are above the sampled one (the
"rank", which nothing here reads), next to 35 ms for the log-softmax itself. The replacement finds
the blocks of the vocabulary that can hold a top-K entry by their maxima, looks at these only, and
counts no ranks (they read 0). On a GPU nothing is replaced.
"""

from typing import Any

import torch
from torch import Tensor

BLOCK = 64

_INSTALLED_MARK = "_takes_blocks"


def block_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the K largest values of each row and their positions, the largest first.

    Shapes: values [R, V] float32, K <= V; results [R, K] float32 and int64. Exact. Of equal
    values the one at the lower position comes first (torch.topk promises no order among them);
    0.0 and -0.0 are equal. NaN counts as larger or smaller than everything, by its sign.
    """
    rows, width = values.shape
    if k == 0:
        return values[:, :0], torch.zeros(rows, 0, dtype=torch.int64)
    blocks = width // BLOCK
    if blocks <= k:
        return _largest(values, torch.arange(width).expand(rows, width), k)
    # k blocks whose maxima come first, in the order of values and then of positions: an entry
    # outside of them has k entries before it, these maxima, and so is not among the first k.
    whole = values[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    maxima = whole.amax(dim=2)
    chosen = _largest(maxima, torch.arange(blocks).expand(rows, blocks), k)[1]
    positions = (chosen.unsqueeze(2) * BLOCK + torch.arange(BLOCK)).flatten(1)
    rest = torch.arange(blocks * BLOCK, width).expand(rows, -1)
    positions = torch.cat([positions, rest], dim=1)
    return _largest(values.gather(1, positions), positions, k)


def _largest(values: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The K first of `values` by value (falling) and then by position (rising)."""
    # One 64-bit key for both: the bits of a float, read as an integer, rise with the float once
    # those of negative numbers are turned round.
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (rising << 32) | (2**32 - 1 - positions)
    picked = torch.topk(keys, k, dim=1).indices
    return values.gather(1, picked), positions.gather(1, picked)


def install_fast_topk() -> None:
    """Replace vLLM's method once; raise if this vLLM has not the one that is meant."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    original = getattr(Sampler, "gather_logprobs", None)
    if original is None:
        raise RuntimeError(
            "this vLLM has no Sampler.gather_logprobs: fast_topk is for vLLM 0.32; leave it out"
        )
    if getattr(original, _INSTALLED_MARK, False):
        return

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        top, ids = block_topk(logprobs, num_logprobs)
        sampled = token_ids.unsqueeze(-1)
        return LogprobsTensors(
            torch.cat((sampled, ids), dim=1).to(torch.int32),
            torch.cat((logprobs.gather(-1, sampled), top), dim=1),
            torch.zeros(len(logprobs), dtype=torch.int64),
        )

    setattr(gather_logprobs, _INSTALLED_MARK, True)
    Sampler.gather_logprobs = staticmethod(gather_logprobs)
