# SPDX-License-Identifier: Apache-2.0
"""Where engines run, who owns them, and how a batch is split; all by hand-worked layouts."""

import pytest

from megatron.rl.errors import UserError
from megatron.rl.parallel import ParallelConfig
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.topology import NodeDevices, Topology, plan_topology


def plan(
    layout: ParallelConfig, ranks_per_node: int | None = None, engines_per_node: int = 1
) -> Topology:
    return plan_topology(
        layout,
        ranks_per_node=ranks_per_node or layout.world_size,
        engines_per_node=engines_per_node,
        seed=5,
    )


def test_one_engine_is_rank_zeros() -> None:
    (engine,) = plan(ParallelConfig(tensor=2)).engines
    assert (engine.number, engine.node, engine.owner, engine.seed) == (0, 0, 0, 5)
    assert engine.log_name == "engine0.log" and engine.devices is None


def test_replicas_are_those_of_megatron() -> None:
    """Ranks count TP first, then CP, DP, PP: rank = tp + 2 cp + 4 dp + 8 pp."""
    layout = ParallelConfig(tensor=2, context=2, data=2, pipeline=2)
    topology = plan(layout)
    assert topology.replicas == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert topology.readers == (0, 4)
    assert topology.replica_of(13) == 1


@pytest.mark.parametrize(
    ("layout", "ranks_per_node", "engines_per_node", "owners"),
    [
        # Readers of TP 2 x DP 4 are 0, 2, 4, 6.
        (ParallelConfig(tensor=2, data=4), 8, 1, (0,)),
        (ParallelConfig(tensor=2, data=4), 8, 2, (0, 4)),
        # Three blocks: 0-1, 2-4, 5-7.
        (ParallelConfig(tensor=2, data=4), 8, 3, (0, 2, 6)),
        (ParallelConfig(tensor=2, data=4), 8, 8, (0, 1, 2, 3, 4, 5, 6, 7)),
        (ParallelConfig(tensor=2, data=4), 4, 2, (0, 2, 4, 6)),
        # The second node has the second pipeline stage, whose ranks read for nobody.
        (ParallelConfig(tensor=2, data=2, pipeline=2), 4, 2, (0, 2, 4, 6)),
        (ParallelConfig(tensor=8, data=2), 8, 2, (0, 4, 8, 12)),
    ],
)
def test_owners_are_spread_and_read_where_they_can(
    layout: ParallelConfig, ranks_per_node: int, engines_per_node: int, owners: tuple[int, ...]
) -> None:
    topology = plan(layout, ranks_per_node, engines_per_node)
    assert topology.owners == owners
    for engine in topology.engines:
        assert engine.owner // ranks_per_node == engine.node == engine.number // engines_per_node
        assert topology.engine_of(engine.owner) == engine
    assert [engine.number for engine in topology.engines] == list(range(len(owners)))
    assert len({engine.seed for engine in topology.engines}) == len(owners)
    assert len({engine.log_name for engine in topology.engines}) == len(owners)


def test_a_server_is_one_engine_of_rank_zero() -> None:
    layout = ParallelConfig(data=4)
    topology = plan_topology(layout, ranks_per_node=2, engines_per_node=1, seed=0, single=True)
    assert topology.owners == (0,)
    with pytest.raises(UserError, match="a server is one engine"):
        plan_topology(layout, ranks_per_node=2, engines_per_node=2, seed=0, single=True)


def test_a_batch_is_split_evenly_and_in_order() -> None:
    topology = plan(ParallelConfig(data=4), engines_per_node=4)
    shares = topology.split(10, "rollout.prompts")
    assert [(share.start, share.stop) for share in shares] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [share.first_sequence(8) for share in shares] == [0, 16, 40, 56]
    with pytest.raises(UserError, match=r"eval\.prompts is 3, but there are 4 engines"):
        topology.split(3, "eval.prompts")


@pytest.mark.parametrize("engines", [1, 2, 3, 4])
def test_the_split_changes_no_sequences_seed(engines: int) -> None:
    settings = SamplingSettings(max_tokens=4, seed=11)
    prompts = [[token] for token in range(1, 8)]
    whole = GenerationRequest.from_lists(prompts, 3, settings).seeds()
    assert whole is not None
    shares = plan(ParallelConfig(data=4), engines_per_node=engines).split(7, "rollout.prompts")
    seeds = []
    for share in shares:
        request = GenerationRequest.from_lists(
            prompts[share.start : share.stop], 3, settings, share.first_sequence(3)
        )
        part = request.seeds()
        assert part is not None
        seeds += part.tolist()
    assert seeds == whole.tolist()


def devices(topology: Topology) -> list[str | None]:
    return [engine.devices for engine in topology.engines]


def test_engines_on_the_trainers_gpus_take_those_of_their_block() -> None:
    layout = ParallelConfig(tensor=2, data=4)
    for gpus, engines, expected in ((1, 2, ["0", "4"]), (4, 2, ["0,1,2,3", "4,5,6,7"])):
        topology = plan_topology(
            layout,
            ranks_per_node=8,
            engines_per_node=engines,
            seed=0,
            devices=NodeDevices("01234567", gpus, "shared"),
        )
        assert devices(topology) == expected
        owned = [engine.devices.split(",")[0] for engine in topology.engines if engine.devices]
        assert owned == [str(owner) for owner in topology.owners]


def test_engines_on_gpus_of_their_own_and_spare_ones() -> None:
    layout = ParallelConfig(data=4)

    def placed(names: str, per_engine: int, sharing: str, engines: int = 2) -> list[str | None]:
        node = NodeDevices(names, per_engine, sharing)  # type: ignore[arg-type]
        return devices(
            plan_topology(layout, ranks_per_node=4, engines_per_node=engines, seed=0, devices=node)
        )

    assert placed("01234567", 2, "own") == ["4,5", "6,7"]
    assert placed("abcdefgh", 1, "spare") == ["e", "f"]
    assert placed("0123", 2, "spare") == ["0,1", "2,3"]
    with pytest.raises(UserError, match=r"2 engines .* of 4 GPUs each .* 8 GPUs .* it has 8"):
        placed("01234567", 4, "own")
    with pytest.raises(UserError, match=r"need 8 GPUs of a node, shared with its 4 .* it has 8"):
        placed("01234567", 4, "shared")


@pytest.mark.parametrize(
    ("ranks_per_node", "engines_per_node", "words"),
    [(4, 5, "engines_per_node is 5, expected 1 to 4"), (3, 1, "8 ranks, which do not fill nodes")],
)
def test_what_does_not_fit_is_refused(
    ranks_per_node: int, engines_per_node: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        plan(ParallelConfig(data=8), ranks_per_node, engines_per_node)


def test_the_printed_form_names_node_owner_and_log() -> None:
    lines = plan(ParallelConfig(tensor=2, data=2), 2).describe()
    assert lines[1] == "engine 1: node 1, owned by rank 2 (replica 1), logs/engine1.log"
