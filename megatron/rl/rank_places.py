# SPDX-License-Identifier: Apache-2.0
"""Where each rank is: its node and its place along every parallel dimension, before any starts."""

from megatron.rl.parallel import ParallelConfig


def describe_ranks(layout: ParallelConfig, ranks_per_node: int) -> list[str]:
    """Return one line a rank. Megatron counts tensor, context, data, pipeline, the fastest first.

    ``expert`` says which share of a stage's experts a rank holds.
    """
    lines = []
    for rank in range(layout.world_size):
        node, local = divmod(rank, ranks_per_node)
        stage, place = divmod(rank, layout.stage_size)
        outer, tensor = divmod(place, layout.tensor)
        data, context = divmod(outer, layout.context)
        lines.append(
            f"rank {rank}: node {node}, local rank {local}; tensor {tensor}, pipeline {stage}, "
            f"context {context}, data {data}, expert {place % layout.expert}"
        )
    return lines
