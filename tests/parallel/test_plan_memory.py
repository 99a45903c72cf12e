# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes of a training step against those that are allocated, part by part.

The benchmark measures: tensors by their storages, a step by a record of storages made and freed,
and its peak by the hook in PyTorch's CPU allocator.
"""

import pytest

from benchmarks.plan_memory import CASES, measure_case

TOLERANCE = 0.15
GIGABYTE = 1e9


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_predictions_are_within_15_percent(name: str) -> None:
    ranks = measure_case(name)
    total = 0
    for rank, result in enumerate(ranks):
        predicted, measured = result["predicted"], result["measured"]
        assert predicted.keys() == measured.keys()
        for part, size in measured.items():
            assert predicted[part] == pytest.approx(size, rel=TOLERANCE), (rank, part)
        # What lives in the buffers that Megatron makes is known exactly, but for their padding.
        for part in ("weights", "gradients", "optimizer"):
            assert predicted[part] == pytest.approx(measured[part], rel=1e-3), (rank, part)
        total += sum(measured[part] for part in ("weights", "gradients", "optimizer", "step peak"))
    assert total > GIGABYTE
