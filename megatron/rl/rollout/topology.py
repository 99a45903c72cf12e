# SPDX-License-Identifier: Apache-2.0
"""Where the rollout engines run, who owns them, and who samples and trains on what.

Pure data, worked out alike on every rank from the layout alone. Each node has ``engines_per_node``
engines. An engine is owned by one trainer rank of its node, which starts it, samples its share of
every batch and hands the arrays on. Each data-parallel replica (the TP x CP x PP ranks that train
on the same sequences) has one reader, which receives its sequences and passes them to the others.

Letters: E engines, P prompts of a batch, R ranks a node.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.rl.errors import UserError
from megatron.rl.parallel import ParallelConfig

# vLLM hands its seed to numpy, which takes 32 bits.
_SEED_LIMIT = 2**32


@dataclass(frozen=True)
class EnginePlace:
    """One engine.

    Attributes:
        number: 0 to E - 1, over all nodes.
        node: where it runs.
        owner: the trainer rank that starts it and feeds it.
        devices: CUDA_VISIBLE_DEVICES of its process; None on CPU.
        seed: of the engine itself; sequences have seeds of their own.
        log_name: file name of its log.
    """

    number: int
    node: int
    owner: int
    devices: str | None
    seed: int
    log_name: str


@dataclass(frozen=True)
class PromptShare:
    """The prompts ``[start, stop)`` of a batch, those of one engine."""

    start: int
    stop: int

    def first_sequence(self, samples_per_prompt: int) -> int:
        """Number of the share's first sequence within the batch.

        It enters the seeds: a sequence has the same one however the batch is split.
        """
        return self.start * samples_per_prompt


@dataclass(frozen=True)
class NodeDevices:
    """The GPUs of a node, and how the engines use them.

    Attributes:
        names: as CUDA_VISIBLE_DEVICES names them; the trainer rank with local number i has the
            i-th.
        per_engine: GPUs of one engine.
        sharing: ``own``: GPUs beyond the trainer's. ``shared``: the trainer's. ``spare``: GPUs
            beyond the trainer's where there are enough, otherwise the trainer's.
    """

    names: Sequence[str]
    per_engine: int
    sharing: Literal["own", "shared", "spare"]


@dataclass(frozen=True)
class Topology:
    """The engines in order of number, and the ranks of each data-parallel replica, reader first."""

    engines: tuple[EnginePlace, ...]
    replicas: tuple[tuple[int, ...], ...]
    ranks_per_node: int

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(engine.owner for engine in self.engines)

    @property
    def readers(self) -> tuple[int, ...]:
        return tuple(replica[0] for replica in self.replicas)

    def engine_of(self, rank: int) -> EnginePlace | None:
        """The engine that a rank owns, if any."""
        return next((engine for engine in self.engines if engine.owner == rank), None)

    def replica_of(self, rank: int) -> int:
        """The data-parallel rank of a rank."""
        return next(d for d, ranks in enumerate(self.replicas) if rank in ranks)

    def split(self, prompts: int, setting: str) -> tuple[PromptShare, ...]:
        """Split a batch over the engines: contiguous, sizes differing by at most one.

        A prompt's responses are one engine's, so that a group stays whole.

        Raises:
            UserError: an engine would have no prompt; ``setting`` is the one to change.
        """
        count = len(self.engines)
        if prompts < count:
            raise UserError(
                f"{setting} is {prompts}, but there are {count} engines and each needs a prompt: "
                f"set it to at least {count}, or lower rollout.engines_per_node"
            )
        edges = [prompts * number // count for number in range(count + 1)]
        return tuple(PromptShare(*pair) for pair in itertools.pairwise(edges))

    def describe(self) -> list[str]:
        """One line an engine, for --dry-run."""
        lines = []
        for engine in self.engines:
            where = "" if engine.devices is None else f" on GPU {engine.devices}"
            lines.append(
                f"engine {engine.number}: node {engine.node}{where}, owned by rank {engine.owner} "
                f"(replica {self.replica_of(engine.owner)}), logs/{engine.log_name}"
            )
        return lines


def plan_topology(
    layout: ParallelConfig,
    *,
    ranks_per_node: int,
    engines_per_node: int,
    seed: int,
    devices: NodeDevices | None = None,
    single: bool = False,
) -> Topology:
    """Place the engines.

    The R ranks of a node are cut into one contiguous block an engine. A block's owner is its first
    rank that reads for a replica, so that its share of the batch need not travel, or else its first
    rank.

    Args:
        devices: GPUs of every node; None on CPU and for engines that run elsewhere.
        single: one engine for all nodes, owned by rank 0: a server, which is reached from anywhere.

    Raises:
        UserError: ranks, engines and GPUs do not fit; the message has the numbers.
    """
    if ranks_per_node < 1 or layout.world_size % ranks_per_node:
        raise UserError(
            f"the layout has {layout.world_size} ranks, which do not fill nodes of "
            f"{ranks_per_node} (LOCAL_WORLD_SIZE)"
        )
    if not 1 <= engines_per_node <= ranks_per_node:
        raise UserError(
            f"rollout.engines_per_node is {engines_per_node}, expected 1 to {ranks_per_node}: each "
            "engine is owned by a rank of its node, and a node has that many"
        )
    if single and engines_per_node > 1:
        raise UserError(
            f"rollout.engines_per_node is {engines_per_node}, expected 1: a server is one engine"
        )
    replicas = _replicas(layout)
    names = _engine_devices(devices, ranks_per_node, engines_per_node)
    engines = []
    for node in range(1 if single else layout.world_size // ranks_per_node):
        for local in range(engines_per_node):
            number = node * engines_per_node + local
            block = range(
                node * ranks_per_node + local * ranks_per_node // engines_per_node,
                node * ranks_per_node + (local + 1) * ranks_per_node // engines_per_node,
            )
            readers = (replica[0] for replica in replicas)
            owner = min((rank for rank in readers if rank in block), default=block[0])
            engine_seed = (seed + number) % _SEED_LIMIT
            log_name = f"engine{number}.log"
            engines.append(EnginePlace(number, node, owner, names[local], engine_seed, log_name))
    return Topology(tuple(engines), replicas, ranks_per_node)


def _replicas(layout: ParallelConfig) -> tuple[tuple[int, ...], ...]:
    """The ranks of each data-parallel replica, stage by stage."""
    size = layout.tensor * layout.context
    return tuple(
        tuple(
            rank
            for stage in range(layout.pipeline)
            for rank in layout.stage_ranks(stage)[replica * size : (replica + 1) * size]
        )
        for replica in range(layout.data)
    )


def _engine_devices(
    devices: NodeDevices | None, ranks_per_node: int, engines_per_node: int
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each engine of a node."""
    if devices is None:
        return [None] * engines_per_node
    each, total = devices.per_engine, len(devices.names)
    needed = each * engines_per_node
    fits_beside = ranks_per_node + needed <= total
    beside = devices.sharing == "own" or (devices.sharing == "spare" and fits_beside)
    if not (fits_beside if beside else needed <= min(ranks_per_node, total)):
        where = (
            f"beside those of its {ranks_per_node} trainer ranks"
            if beside
            else f"shared with its {ranks_per_node} trainer ranks"
        )
        raise UserError(
            f"{engines_per_node} engines (rollout.engines_per_node) of {each} GPUs each "
            f"(rollout.engine_args) need {needed} GPUs of a node, {where}; it has {total}"
        )
    # Where GPUs are shared, an engine's lie in its block of ranks.
    starts = [
        ranks_per_node + local * each if beside else local * ranks_per_node // engines_per_node
        for local in range(engines_per_node)
    ]
    return [",".join(devices.names[start : start + each]) for start in starts]
