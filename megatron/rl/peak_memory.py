# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank has needed so far."""

import resource

import torch

# Linux counts the resident set in KiB.
MAXRSS_UNIT = 1 << 10


def peak_bytes(device: torch.device) -> int:
    """Return the peak of this process: of its GPU's allocator, or of its resident set on CPU.

    The rollout engine is a process of its own and is not in it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT
