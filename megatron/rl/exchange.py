# SPDX-License-Identifier: Apache-2.0
"""Rollout arrays from the rank whose engine sampled them to the ranks that train on them.

All ranks learn one small table of the whole batch and plan every optimizer step from it alike.
The arrays go point to point, as they are stored (top-K columns stay encoded): from each owner of an
engine to the reader of each data-parallel replica, and from there to the replica's other ranks. No
rank receives a sequence that its replica does not train on. Everything travels over gloo, on the
host.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron.rl.batch import IntArray, Sequences
from megatron.rl.parallel import ParallelConfig
from megatron.rl.rollout.topk_columns import Precision, TopKColumns
from megatron.rl.rollout.topology import Topology

# Ranks without an engine wait for the longest response of a batch. An engine that hangs is found by
# its owner (rollout.stall_timeout_s), and a rank that dies ends the run.
SAMPLING_TIMEOUT = timedelta(days=7)
# A message is sent in pieces of this size.
MESSAGE_BYTES = 256 * 1024**2

# What only the loss reads, which is computed on the last pipeline stage.
_BEHAVIOR = ("log_probs", "policy_versions", "topk_log_probs", "topk_ids_low", "topk_ids_high")

_Report = TypeVar("_Report")


@dataclass(frozen=True)
class SequenceTable:
    """What every rank knows of each of the B sequences of a batch, in the batch's order.

    group int64, prompt_lengths int64, response_lengths int64, rewards float64, advantages float32,
    finished bool, versions int32 (the newest that produced a token of it), in_loss bool (the loss
    and its means count it).
    """

    group: IntArray
    prompt_lengths: IntArray
    response_lengths: IntArray
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float32]
    finished: NDArray[np.bool_]
    versions: NDArray[np.int32]
    in_loss: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.group)

    @property
    def input_lengths(self) -> IntArray:
        """As :attr:`Sequences.input_lengths`."""
        return self.prompt_lengths + self.response_lengths - 1

    @classmethod
    def join(cls, parts: "Sequence[SequenceTable]") -> "SequenceTable":
        """The parts of the engines, in their order, as one table."""
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class TopKForm:
    """How the top-K columns of a batch are stored; fixes dtypes and widths of their arrays."""

    k: int
    vocab_size: int
    precision: Precision

    def zeros(self, tokens: int) -> dict[str, NDArray[Any]]:
        """Arrays for so many tokens, by name."""
        empty = TopKColumns.empty(self.vocab_size, self.k, self.precision)
        return {
            name: np.zeros((tokens, array.shape[1]), array.dtype)
            for name, array in empty.arrays().items()
        }


class Exchange:
    """This rank's side of the exchange. All methods are collective over all ranks.

    Attributes:
        received_bytes: of rollout arrays, since the start, from other ranks.
    """

    def __init__(self, topology: Topology, layout: ParallelConfig, form: TopKForm) -> None:
        """Build the groups; every rank does so at the same time."""
        self._rank = dist.get_rank()
        self._topology = topology
        self._form = form
        self._replica = topology.replica_of(self._rank)
        self._reader = topology.readers[self._replica]
        self._everyone = dist.new_group(backend="gloo", timeout=SAMPLING_TIMEOUT)
        heads = layout.tensor * layout.context
        self._replica_group = _own_group(topology.replicas, layout.timeout)
        # The reader and the ranks of the last stage, which need what the loss reads.
        scorers = [(r[0], *r[max(1, len(r) - heads) :]) for r in topology.replicas]
        self._scorer_group = _own_group(scorers, layout.timeout)
        self.received_bytes = 0

    def any_rank(self, flag: bool) -> bool:
        """Return whether some rank says so; like sampling, it may take as long as it takes."""
        return bool(self.largest(int(flag)))

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers; like sampling, it may take long."""
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._everyone)
        return int(numbers)

    def gather_reports(self, own: _Report | None) -> list[_Report]:
        """Give every rank the reports of all owners, by number of the engine.

        Args:
            own: small; None on ranks without an engine. Waits for the slowest engine.
        """
        reports: list[_Report | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own, group=self._everyone)
        present = [reports[owner] for owner in self._topology.owners]
        assert None not in present, "an owner of an engine has no report"
        return [report for report in present if report is not None]

    def distribute(
        self, own: Sequences | None, tables: Sequence[SequenceTable], replica: IntArray
    ) -> Sequences:
        """Return the sequences that this rank's replica trains on.

        On ranks that do not compute the loss the top-K columns have no entries, and log-probs and
        versions are zero.

        Args:
            own: what this rank's engine sampled; None without one.
            tables: of every engine's part of the batch, by number of the engine.
            replica: ``[B]``, the data-parallel rank that trains on each sequence.
        """
        table = SequenceTable.join(tables)
        first = np.cumsum([0, *(len(part) for part in tables)])
        numbers = np.flatnonzero(replica == self._replica)
        form = self._form
        if self._scorer_group is None:
            form = dataclasses.replace(form, k=0)
        share = _Share.empty(numbers, table, form)
        for step in range(len(self._topology.replicas)):
            self._route(own, share, first, replica, step)
        self._pass_on(share)
        return share.sequences(table)

    def _route(
        self, own: Sequences | None, share: "_Share", first: IntArray, replica: IntArray, step: int
    ) -> None:
        """Bring the arrays of the step's pairs of engine and reader to the reader.

        In each step an engine's owner sends to one reader, and to another than its neighbor.
        """
        requests: list[dist.Work] = []
        arriving: list[tuple[NDArray[np.uint8], slice]] = []
        for engine in self._topology.engines:
            target = (engine.number + step) % len(self._topology.replicas)
            start, stop = first[engine.number], first[engine.number + 1]
            rows = start + np.flatnonzero(replica[start:stop] == target)
            reader = self._topology.readers[target]
            if not len(rows) or self._rank not in (engine.owner, reader):
                continue
            if self._rank == reader:
                places = slice(*np.searchsorted(share.numbers, (rows[0], rows[-1] + 1)))
            if self._rank == engine.owner:
                assert own is not None
                message = _message(own, rows - start)
                if reader == self._rank:
                    share.fill(message, places)
                else:
                    requests += self._transfer(dist.isend, message, reader)
            else:
                buffer = np.empty(share.nbytes(places), dtype=np.uint8)
                requests += self._transfer(dist.irecv, buffer, engine.owner)
                arriving.append((buffer, places))
        for request in requests:
            request.wait()
        for buffer, places in arriving:
            self.received_bytes += len(buffer)
            share.fill(buffer, places)

    def _transfer(self, call: Any, buffer: NDArray[np.uint8], peer: int) -> list[dist.Work]:
        pieces = torch.from_numpy(buffer).split(MESSAGE_BYTES)
        return [call(piece, peer, group=self._everyone) for piece in pieces]

    def _pass_on(self, share: "_Share") -> None:
        """Copy the reader's arrays to the other ranks of its replica."""
        for name, array in share.arrays.items():
            group = self._scorer_group if name in _BEHAVIOR else self._replica_group
            if group is None or group.size() == 1 or not array.nbytes:
                continue
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
            for piece in flat.split(MESSAGE_BYTES):
                dist.broadcast(piece, src=self._reader, group=group)
            if self._rank != self._reader:
                self.received_bytes += array.nbytes


@dataclass(frozen=True)
class _Share:
    """Some sequences of a batch whose arrays arrive part by part.

    numbers: of the sequences, ascending. Offsets are those of prompt and response tokens.
    arrays: by name, per prompt token or per response token.
    """

    numbers: IntArray
    prompt_offsets: IntArray
    response_offsets: IntArray
    arrays: dict[str, NDArray[Any]]

    @classmethod
    def empty(cls, numbers: IntArray, table: SequenceTable, form: TopKForm) -> "_Share":
        prompt_offsets = np.cumsum([0, *table.prompt_lengths[numbers]])
        response_offsets = np.cumsum([0, *table.response_lengths[numbers]])
        tokens = int(response_offsets[-1])
        arrays = {
            "prompt_tokens": np.zeros(int(prompt_offsets[-1]), np.int32),
            "response_tokens": np.zeros(tokens, np.int32),
            "log_probs": np.zeros(tokens, np.float32),
            "policy_versions": np.zeros(tokens, np.int32),
            **form.zeros(tokens),
        }
        return cls(numbers, prompt_offsets, response_offsets, arrays)

    def nbytes(self, places: slice) -> int:
        """Bytes of the arrays of neighboring sequences."""
        return sum(part.nbytes for part in self._parts(places))

    def fill(self, message: NDArray[np.uint8], places: slice) -> None:
        """Write a message, made by :func:`_message`, to the sequences at ``places``."""
        expected = self.nbytes(places)
        if len(message) != expected:
            raise RuntimeError(
                f"an owner sent {len(message)} bytes for sequences {self.numbers[places][0]} to "
                f"{self.numbers[places][-1]}, expected {expected}"
            )
        position = 0
        for part in self._parts(places):
            flat = part.reshape(-1).view(np.uint8)
            flat[:] = message[position : position + len(flat)]
            position += len(flat)

    def sequences(self, table: SequenceTable) -> Sequences:
        per_token = dict(self.arrays)
        topk = TopKColumns.from_arrays(per_token)
        for name in topk.arrays():
            del per_token[name]
        return Sequences(
            number=self.numbers,
            prompt_offsets=self.prompt_offsets,
            response_offsets=self.response_offsets,
            group=table.group[self.numbers],
            advantages=table.advantages[self.numbers],
            topk=topk,
            **per_token,
        )

    def _parts(self, places: slice) -> Iterator[NDArray[Any]]:
        for name, array in self.arrays.items():
            offsets = self.prompt_offsets if name == "prompt_tokens" else self.response_offsets
            yield array[offsets[places.start] : offsets[places.stop]]


def _message(own: Sequences, rows: IntArray) -> NDArray[np.uint8]:
    """The arrays of some sequences, in the order of a share's, as one buffer."""
    prompt_tokens, response_tokens = (
        np.concatenate([np.arange(*offsets[row : row + 2]) for row in rows])
        for offsets in (own.prompt_offsets, own.response_offsets)
    )
    arrays = [
        own.prompt_tokens[prompt_tokens],
        own.response_tokens[response_tokens],
        own.log_probs[response_tokens],
        own.policy_versions[response_tokens],
        *own.topk.take(response_tokens).arrays().values(),
    ]
    return np.concatenate(
        [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    )


def _own_group(groups: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Build a gloo group of each; return the one that this rank is in."""
    rank, own = dist.get_rank(), None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        own = group if rank in ranks else own
    return own
