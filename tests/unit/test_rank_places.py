# SPDX-License-Identifier: Apache-2.0
"""The printed place of each rank, against Megatron's own numbering."""

import re

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron.rl.parallel import ParallelConfig
from megatron.rl.rank_places import describe_ranks


@pytest.mark.parametrize(
    "layout",
    [
        ParallelConfig(tensor=4, data=8, expert=8),
        ParallelConfig(tensor=2, pipeline=2, context=2, data=2, expert=4),
        ParallelConfig(data=3),
    ],
    ids=["30b", "all dimensions", "data only"],
)
def test_places_are_those_of_megatron(layout: ParallelConfig) -> None:
    per_node = 4
    lines = describe_ranks(layout, per_node)
    assert len(lines) == layout.world_size
    numbers = [[int(n) for n in re.findall(r"\d+", line)] for line in lines]
    generator = RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context,
        order="tp-cp-ep-dp-pp",
    )  # fmt: skip
    expert_data = layout.stage_size // layout.expert
    experts = RankGenerator(
        tp=1, ep=layout.expert, dp=expert_data, pp=layout.pipeline, cp=1, order="tp-cp-ep-dp-pp"
    )
    for column, dimension, source in (
        (3, "tp", generator), (4, "pp", generator), (5, "cp", generator), (6, "dp", generator),
        (7, "ep", experts),
    ):  # fmt: skip
        for group in source.get_ranks(dimension):
            assert [numbers[rank][column] for rank in group] == list(range(len(group))), dimension
    assert [n[:3] for n in numbers] == [[r, r // per_node, r % per_node] for r in range(len(lines))]
