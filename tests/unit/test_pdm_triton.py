# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels under Triton's interpreter against the readable twin, on ragged shapes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.parallel.spawn import run_ranks

CASES = [
    {"rows": 5, "width": 37, "support": 4, "hidden": 8, "temperature": 1.0, "bonus": False},
    {"rows": 3, "width": 5000, "support": 21, "hidden": 6, "temperature": 0.7, "bonus": True},
    {"rows": 7, "width": 1, "support": 2, "hidden": 3, "temperature": 1.3, "bonus": True},
    {"rows": 2, "width": 4096, "support": 1, "hidden": 4, "temperature": 1.0, "bonus": False},
]


def compare_in_interpreter(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[float]:
    """Return the largest relative difference of each case; runs in a process of its own."""
    os.environ["TRITON_INTERPRET"] = "1"
    from pdm.kernels.local_step import RowGradient, WeightGradient
    from pdm.kernels.reference import ReferenceStep
    from pdm.kernels.triton_step import TritonStep

    worst = []
    for seed, case in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        rows, width = case["rows"], case["width"]
        hidden, weight = randn(rows, case["hidden"]), randn(width, case["hidden"])
        columns = torch.stack(
            [torch.randperm(max(width, 30), generator=generator)[: case["support"]]] * rows
        )
        columns[columns >= width] = -1  # owned by another shard
        coefficient = randn(rows)
        coefficient[0] = 0.0
        gradient = RowGradient(
            log_normalizer=(hidden @ weight.T / case["temperature"]).logsumexp(-1),
            coefficient=coefficient,
            sampled_column=columns[:, 0].contiguous(),
            entropy_coefficient=randn(rows) if case["bonus"] else None,
            entropy=randn(rows).abs(),
        )
        results = []
        for step in (
            ReferenceStep(case["temperature"]),
            TritonStep(case["temperature"], torch.empty(rows * width)),
        ):
            packed = step.statistics(hidden, weight, columns).pack()
            hidden_grad = torch.zeros_like(hidden)
            weight_grad = WeightGradient(weight, len(weight), torch.float32)
            step.add_gradient(gradient, hidden_grad, weight_grad)
            results.append((packed, hidden_grad, weight_grad.finish()))
        worst.append(
            max(
                float((b - a).abs().max() / a.abs().max().clamp_min(1e-30))
                for a, b in zip(*results, strict=True)
            )
        )
    return worst


def test_kernels_match_their_twin() -> None:
    pytest.importorskip("triton")
    (differences,) = run_ranks(compare_in_interpreter, 1, CASES)
    assert len(differences) == len(CASES)
    assert max(differences) < 2e-6, differences


def fused_in_interpreter(rank: int, world_size: int) -> list[float]:
    """Return how far both gradients of the Triton path are from the twin's, over several chunks."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.unit.test_pdm_fused import CONFIG, make_head, run_fused

    head = make_head(tokens=9, vocab=200, dtype=torch.float32)
    expected = run_fused(head, CONFIG, impl="reference", chunk_size=4)
    actual = run_fused(head, CONFIG, impl="triton", chunk_size=4)
    return [
        float((actual[name] - expected[name]).norm() / expected[name].norm())
        for name in ("hidden", "weight")
    ]


def test_fused_loss_over_several_chunks() -> None:
    pytest.importorskip("triton")
    (differences,) = run_ranks(fused_in_interpreter, 1)
    assert max(differences) < 1e-5, differences
