# SPDX-License-Identifier: Apache-2.0
"""Token records with chosen columns, for tests of metrics."""

from collections import Counter
from typing import Any

import torch

from megatron.rl.policy.head import TokenRecord


def record(
    sequence: list[int], behavior: list[float], policy: list[float], **more: Any
) -> TokenRecord:
    """Positions count up within each sequence unless given; what is not given is 0 or false."""
    count = len(sequence)
    seen: Counter[int] = Counter()
    positions = []
    for number in sequence:
        positions.append(seen[number])
        seen[number] += 1

    def column(name: str, default: list[float] | None = None) -> torch.Tensor:
        return torch.tensor(more.get(name, default or [0.0] * count), dtype=torch.float64)

    flags = {
        name: torch.tensor(more.get(name, [False] * count), dtype=torch.bool)
        for name in ("outside", "outward")
    }
    return TokenRecord(
        sequence=torch.tensor(sequence, dtype=torch.int64),
        position=torch.tensor(more.get("position", positions), dtype=torch.int64),
        policy_version=torch.tensor(more.get("policy_version", [0] * count), dtype=torch.int64),
        behavior_log_prob=torch.tensor(behavior, dtype=torch.float64),
        policy_log_prob=torch.tensor(policy, dtype=torch.float64),
        divergence=column("divergence"),
        topk_kl=column("topk_kl"),
        entropy=column("entropy"),
        keep=~(flags["outside"] & flags["outward"]),
        certified=None,
        accepted=more.get("accepted"),
        **flags,
    )
