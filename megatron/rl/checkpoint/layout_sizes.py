# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of the layout that saved it."""

from megatron.rl.parallel import ParallelConfig


def layout_sizes(layout: ParallelConfig) -> dict[str, int]:
    """Return the parallel sizes; with equal ones, equal ranks have equal parts of the model."""
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "data": layout.data,
        "expert": layout.expert,
        "virtual": layout.virtual or 1,
    }
