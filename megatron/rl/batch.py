# SPDX-License-Identifier: Apache-2.0
"""From a rollout batch on the host to packed micro-batches on the device.

One convention throughout: response token ``i`` of a sequence with ``P`` prompt tokens is predicted
at input position ``P - 1 + i`` of that sequence. The last token of a sequence predicts nothing and
is not an input. Only response tokens have rows in the loss; prompt tokens never do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.rl.context_parallel import ContextShard, held_positions
from megatron.rl.rollout.topk_columns import TopKColumns
from pdm import BehaviorSupport, PolicyLossConfig, token_weights

IntArray = np.ndarray
FloatArray = np.ndarray


@dataclass(frozen=True)
class Sequences:
    """B sequences of prompt and response, N response tokens in all, on the host.

    They are a rollout batch, or those of it that an engine sampled or a rank trains on.

    Attributes:
        number: int64 ``[B]``, the number of each sequence within the rollout batch, ascending.
        prompt_tokens: int32, all prompts, one after the other (one copy a sequence).
        prompt_offsets: int64 ``[B + 1]``.
        response_tokens: int32 ``[N]``.
        response_offsets: int64 ``[B + 1]``.
        group: int64 ``[B]``, the number of the prompt that a sequence answers.
        advantages: float32 ``[B]``, one a sequence.
        log_probs: float32 ``[N]``, of the response tokens under the behavior policy.
        topk: the K largest of each response token ``[N]``, encoded; decoded row by row as packed.
        policy_versions: int32 ``[N]``, of the weights that produced each response token.
    """

    number: IntArray
    prompt_tokens: IntArray
    prompt_offsets: IntArray
    response_tokens: IntArray
    response_offsets: IntArray
    group: IntArray
    advantages: FloatArray
    log_probs: FloatArray
    topk: TopKColumns
    policy_versions: IntArray

    def __len__(self) -> int:
        return len(self.group)

    def places_of(self, numbers: IntArray) -> IntArray:
        """Return where the sequences with these numbers are, which must all be here."""
        return np.asarray(np.searchsorted(self.number, numbers))

    @property
    def response_lengths(self) -> IntArray:
        return np.diff(self.response_offsets)

    @property
    def input_lengths(self) -> IntArray:
        """Input tokens a sequence brings to a packed batch: all but its last token."""
        return np.diff(self.prompt_offsets) + self.response_lengths - 1


@dataclass(frozen=True)
class MinibatchSize:
    """All of an optimizer step, over all ranks and micro-batches: the denominators of its means."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, response_lengths: IntArray) -> "MinibatchSize":
        """The size of sequences with the given numbers of response tokens."""
        return cls(int(response_lengths.sum()), len(response_lengths))


@dataclass(frozen=True)
class MicroBatch:
    """Packed input tokens and, for each response token, what the loss needs.

    T input tokens, N response tokens (rows), S support columns: those of this context-parallel
    rank. A response token is trained on where the position that predicts it lies, on one rank.

    Attributes:
        input_ids: int64 ``[1, T]``.
        position_ids: int64 ``[1, T]``, counted within each sequence.
        packing: Megatron's ``cu_seqlens`` and longest length, of the whole micro-batch.
        rows: int64 ``[N]``, the input position that predicts each response token.
        support: behavior log-probs of the sampled token and the top K.
        advantages: float32 ``[N]``.
        weights: float32 ``[N]``, the aggregation weight of each token.
        sequence: int64 ``[N]``, the number of each token's sequence within the rollout batch.
        position: int64 ``[N]``, of each token within its response, from 0.
        policy_version: int64 ``[N]``, of the weights that produced each token.
        local_sequence: int64 ``[N]``, the same within this micro-batch, 0 to ``num_sequences - 1``.
        num_sequences: sequences of this micro-batch; each lies whole in it, if on several ranks.
        gathered_row: int64 ``[N]``, the number of each row among those of all context-parallel
            ranks, which are counted in the order of the sequences.
        gathered_sequence: int64 ``[M]``, ``local_sequence`` of the M rows of all these ranks.
    """

    input_ids: Tensor
    position_ids: Tensor
    packing: PackedSeqParams
    rows: Tensor
    support: BehaviorSupport
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    position: Tensor
    policy_version: Tensor
    local_sequence: Tensor
    num_sequences: int
    gathered_row: Tensor
    gathered_sequence: Tensor

    @property
    def num_input_tokens(self) -> int:
        return self.input_ids.size(1)


def minibatches(
    group: IntArray, prompts_per_minibatch: int, generator: np.random.Generator
) -> Iterator[IntArray]:
    """Yield the sequences of each minibatch: groups stay whole, prompts come in random order.

    Args:
        group: int64 ``[B]``, the prompt of each sequence of the rollout batch.
    """
    prompts = generator.permutation(np.unique(group))
    for start in range(0, len(prompts), prompts_per_minibatch):
        chosen = prompts[start : start + prompts_per_minibatch]
        yield np.flatnonzero(np.isin(group, chosen))


def plan_micro_batches(
    lengths: IntArray,
    members: IntArray,
    *,
    data_parallel: int,
    max_tokens: int,
    count_multiple: int = 1,
    replica: IntArray | None = None,
) -> list[list[IntArray]]:
    """Spread sequences over data-parallel ranks and pack them into micro-batches.

    Longest first to the least loaded rank, then first-fit into micro-batches of at most
    ``max_tokens`` input tokens (a longer sequence has one of its own). Every rank gets as many
    micro-batches, some perhaps empty, since ranks meet in collectives at each of them.

    Args:
        lengths: input tokens of every sequence of the rollout batch.
        members: the sequences of this minibatch.
        count_multiple: the number of micro-batches becomes a multiple of this, by empty ones.
        replica: int64, the data-parallel rank of every sequence of the rollout batch where that is
            decided already, since only that rank has the sequence.

    Returns:
        For each rank its micro-batches, each an array of sequence numbers.
    """
    loads = np.zeros(data_parallel, dtype=np.int64)
    bins: list[list[list[int]]] = [[] for _ in range(data_parallel)]
    room: list[list[int]] = [[] for _ in range(data_parallel)]
    for member in members[np.argsort(-lengths[members], kind="stable")]:
        rank = int(np.argmin(loads) if replica is None else replica[member])
        length = int(lengths[member])
        loads[rank] += length
        fit = next((i for i, free in enumerate(room[rank]) if free >= length), None)
        if fit is None:
            bins[rank].append([])
            room[rank].append(max_tokens)
            fit = len(room[rank]) - 1
        bins[rank][fit].append(int(member))
        room[rank][fit] -= length
    count = max(1, max(len(rank_bins) for rank_bins in bins))
    count = -(-count // count_multiple) * count_multiple
    return [
        [np.array(sorted(b), dtype=np.int64) for b in rank_bins + [[]] * (count - len(rank_bins))]
        for rank_bins in bins
    ]


@dataclass(frozen=True)
class _Layout:
    """Where everything lies in a whole micro-batch, before context parallelism cuts it.

    Attributes:
        cu_seqlens: int64 ``[B + 1]``, padding counted.
        tokens: int64 ``[T]``, 0 in padding.
        rows: int64 ``[M]``, the position that predicts each response token.
        token_index: int64 ``[M]``, the number of each response token in the rollout batch.
        local_sequence: int64 ``[M]``.
    """

    cu_seqlens: IntArray
    tokens: IntArray
    rows: IntArray
    token_index: IntArray
    local_sequence: IntArray


def _lay_out(
    sequences: Sequences, members: IntArray, sequence_multiple: int, total_multiple: int
) -> _Layout:
    lengths = sequences.input_lengths[members]
    slots = -(-lengths // sequence_multiple) * sequence_multiple
    used = int(slots.sum())
    padding = max(total_multiple, -(-used // total_multiple) * total_multiple) - used
    cu_seqlens = np.concatenate([[0], np.cumsum(slots), [used + padding] if padding else []])
    cu_seqlens = cu_seqlens.astype(np.int64)
    tokens = np.zeros(used + padding, dtype=np.int64)
    rows, picked = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for member, start in zip(members, cu_seqlens[: len(members)], strict=True):
        prompt = sequences.prompt_tokens[slice(*sequences.prompt_offsets[member : member + 2])]
        first, last = sequences.response_offsets[member : member + 2]
        response = sequences.response_tokens[first:last]
        inputs = np.concatenate([prompt, response[:-1]])
        tokens[start : start + len(inputs)] = inputs
        rows.append(start + len(prompt) - 1 + np.arange(len(response)))
        picked.append(np.arange(first, last))
    local_sequence = np.repeat(np.arange(len(members)), sequences.response_lengths[members])
    return _Layout(cu_seqlens, tokens, np.concatenate(rows), np.concatenate(picked), local_sequence)


def pack(
    sequences: Sequences,
    members: IntArray,
    *,
    minibatch: MinibatchSize,
    loss: PolicyLossConfig,
    pad_multiple: int,
    device: torch.device,
    context: ContextShard | None = None,
) -> MicroBatch:
    """Pack the given sequences into one micro-batch.

    Args:
        members: places in ``sequences``, possibly none.
        minibatch: its counts are the denominators of the aggregation.
        loss: says how the minibatch's token losses are averaged.
        pad_multiple: the input length becomes a multiple of this (sequence parallelism splits it
            over ranks) by a last sequence of padding that no row points at.
        context: cuts out this context-parallel rank's part; sequences are then padded at their
            end, where causality keeps the padding from every real token. None: all of it.
    """
    context = context or ContextShard()
    whole = _lay_out(
        sequences,
        members,
        context.sequence_multiple,
        math.lcm(context.sequence_multiple, context.size * pad_multiple),
    )
    held = held_positions(torch.from_numpy(whole.cu_seqlens), context).numpy()
    place = np.full(len(whole.tokens), -1)
    place[held] = np.arange(len(held))
    gathered_row = np.flatnonzero(place[whole.rows] >= 0)
    token_index = whole.token_index[gathered_row]
    local_sequence = whole.local_sequence[gathered_row]
    sequence = members[local_sequence]
    slots = np.diff(whole.cu_seqlens)
    positions = np.arange(len(whole.tokens)) - np.repeat(whole.cu_seqlens[:-1], slots)
    response_lengths = sequences.response_lengths
    topk_ids, topk_log_probs = sequences.topk.decode(token_index)

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    return MicroBatch(
        input_ids=tensor(whole.tokens[held], torch.int64).unsqueeze(0),
        position_ids=tensor(positions[held], torch.int64).unsqueeze(0),
        packing=_packed_seq_params(
            tensor(whole.cu_seqlens, torch.int32), int(slots.max()), context
        ),
        rows=tensor(place[whole.rows[gathered_row]], torch.int64),
        support=BehaviorSupport.from_topk(
            tensor(topk_ids, torch.int64),
            tensor(topk_log_probs, torch.float32),
            tensor(sequences.response_tokens[token_index], torch.int64),
            tensor(sequences.log_probs[token_index], torch.float32),
        ),
        advantages=tensor(sequences.advantages[sequence], torch.float32),
        weights=token_weights(
            tensor(sequence, torch.int64),
            tensor(response_lengths, torch.int64),
            aggregation=loss.aggregation,
            global_tokens=minibatch.tokens,
            global_sequences=minibatch.sequences,
            fixed_length=loss.fixed_length,
        ),
        sequence=tensor(sequences.number[sequence], torch.int64),
        position=tensor(token_index - sequences.response_offsets[sequence], torch.int64),
        policy_version=tensor(sequences.policy_versions[token_index], torch.int64),
        local_sequence=tensor(local_sequence, torch.int64),
        num_sequences=len(members),
        gathered_row=tensor(gathered_row, torch.int64),
        gathered_sequence=tensor(whole.local_sequence, torch.int64),
    )


def _packed_seq_params(cu_seqlens: Tensor, longest: int, context: ContextShard) -> PackedSeqParams:
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if context.size > 1:
        # Padding counts as the end of its sequence, in both pairs: Transformer Engine then takes
        # its kernels without gaps, and need not compare the pairs on the host.
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = cu_seqlens
        params.pad_between_seqs = False
    return params
