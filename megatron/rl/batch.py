# SPDX-License-Identifier: Apache-2.0
"""From a rollout batch on the host to packed micro-batches on the device.

One convention throughout: response token ``i`` of a sequence with ``P`` prompt tokens is predicted
at input position ``P - 1 + i`` of that sequence. The last token of a sequence predicts nothing and
is not an input. Only response tokens have rows in the loss; prompt tokens never do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from pdm import BehaviorSupport, PolicyLossConfig, token_weights

IntArray = np.ndarray
FloatArray = np.ndarray


@dataclass(frozen=True)
class Sequences:
    """A rollout batch: B sequences of prompt and response, N response tokens in all, on the host.

    Attributes:
        prompt_tokens: int32, all prompts, one after the other (one copy a sequence).
        prompt_offsets: int64 ``[B + 1]``.
        response_tokens: int32 ``[N]``.
        response_offsets: int64 ``[B + 1]``.
        group: int64 ``[B]``, the number of the prompt that a sequence answers.
        advantages: float32 ``[B]``, one a sequence.
        log_probs: float32 ``[N]``, of the response tokens under the behavior policy.
        topk_ids: int32 ``[N, K]``, -1 where absent.
        topk_log_probs: float32 ``[N, K]``, -inf where absent.
    """

    prompt_tokens: IntArray
    prompt_offsets: IntArray
    response_tokens: IntArray
    response_offsets: IntArray
    group: IntArray
    advantages: FloatArray
    log_probs: FloatArray
    topk_ids: IntArray
    topk_log_probs: FloatArray

    def __len__(self) -> int:
        return len(self.group)

    @property
    def response_lengths(self) -> IntArray:
        return np.diff(self.response_offsets)

    @property
    def input_lengths(self) -> IntArray:
        """Input tokens a sequence brings to a packed batch: all but its last token."""
        return np.diff(self.prompt_offsets) + self.response_lengths - 1


@dataclass(frozen=True)
class MicroBatch:
    """Packed input tokens and, for each response token, what the loss needs.

    T input tokens, N response tokens (rows), S support columns.

    Attributes:
        input_ids: int64 ``[1, T]``.
        position_ids: int64 ``[1, T]``, counted within each sequence.
        packing: Megatron's ``cu_seqlens`` and longest length.
        rows: int64 ``[N]``, the input position that predicts each response token.
        support: behavior log-probs of the sampled token and the top K.
        advantages: float32 ``[N]``.
        weights: float32 ``[N]``, the aggregation weight of each token.
        sequence: int64 ``[N]``, the number of each token's sequence within the rollout batch.
        local_sequence: int64 ``[N]``, the same within this micro-batch, 0 to ``num_sequences - 1``.
        num_sequences: sequences of this micro-batch; each lies whole in it.
    """

    input_ids: Tensor
    position_ids: Tensor
    packing: PackedSeqParams
    rows: Tensor
    support: BehaviorSupport
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    local_sequence: Tensor
    num_sequences: int

    @property
    def num_input_tokens(self) -> int:
        return self.input_ids.size(1)


def minibatches(
    sequences: Sequences, prompts_per_minibatch: int, generator: np.random.Generator
) -> Iterator[IntArray]:
    """Yield the sequences of each minibatch: groups stay whole, prompts come in random order."""
    prompts = generator.permutation(np.unique(sequences.group))
    for start in range(0, len(prompts), prompts_per_minibatch):
        chosen = prompts[start : start + prompts_per_minibatch]
        yield np.flatnonzero(np.isin(sequences.group, chosen))


def plan_micro_batches(
    lengths: IntArray, members: IntArray, *, data_parallel: int, max_tokens: int
) -> list[list[IntArray]]:
    """Spread sequences over data-parallel ranks and pack them into micro-batches.

    Longest first to the least loaded rank, then first-fit into micro-batches of at most
    ``max_tokens`` input tokens (a longer sequence has one of its own). Every rank gets as many
    micro-batches, some perhaps empty, since ranks meet in collectives at each of them.

    Args:
        lengths: input tokens of every sequence of the rollout batch.
        members: the sequences of this minibatch.

    Returns:
        For each rank its micro-batches, each an array of sequence numbers.
    """
    loads = np.zeros(data_parallel, dtype=np.int64)
    bins: list[list[list[int]]] = [[] for _ in range(data_parallel)]
    room: list[list[int]] = [[] for _ in range(data_parallel)]
    for member in members[np.argsort(-lengths[members], kind="stable")]:
        rank = int(np.argmin(loads))
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
    return [
        [np.array(sorted(b), dtype=np.int64) for b in rank_bins + [[]] * (count - len(rank_bins))]
        for rank_bins in bins
    ]


def pack(
    sequences: Sequences,
    members: IntArray,
    *,
    minibatch: IntArray,
    loss: PolicyLossConfig,
    pad_multiple: int,
    device: torch.device,
) -> MicroBatch:
    """Pack the given sequences into one micro-batch.

    Args:
        members: sequence numbers, possibly none.
        minibatch: all sequences of this optimizer step, over all ranks and micro-batches; the
            denominators of the aggregation are theirs.
        loss: says how the minibatch's token losses are averaged.
        pad_multiple: the input length becomes a multiple of this (sequence parallelism splits it
            over ranks) by a last sequence of padding that no row points at.
    """
    lengths = sequences.input_lengths[members]
    total = int(lengths.sum())
    padding = max(pad_multiple, -(-total // pad_multiple) * pad_multiple) - total
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths), [total + padding] if padding else []])
    tokens = np.zeros(total + padding, dtype=np.int64)
    rows, picked = [], []
    for member, start in zip(members, cu_seqlens[: len(members)].astype(np.int64), strict=True):
        prompt = sequences.prompt_tokens[slice(*sequences.prompt_offsets[member : member + 2])]
        first, last = sequences.response_offsets[member : member + 2]
        response = sequences.response_tokens[first:last]
        inputs = np.concatenate([prompt, response[:-1]])
        tokens[start : start + len(inputs)] = inputs
        rows.append(start + len(prompt) - 1 + np.arange(len(response)))
        picked.append(np.arange(first, last))
    row_index = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    token_index = np.concatenate(picked) if picked else np.zeros(0, dtype=np.int64)
    response_lengths = sequences.response_lengths
    sequence = np.repeat(members, response_lengths[members])

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    support = BehaviorSupport.from_topk(
        tensor(sequences.topk_ids[token_index], torch.int64),
        tensor(sequences.topk_log_probs[token_index], torch.float32),
        tensor(sequences.response_tokens[token_index], torch.int64),
        tensor(sequences.log_probs[token_index], torch.float32),
    )
    cu = tensor(cu_seqlens, torch.int32)
    longest = int(np.diff(cu_seqlens).max())
    positions = np.arange(total + padding) - np.repeat(
        cu_seqlens[:-1], np.diff(cu_seqlens).astype(np.int64)
    )
    return MicroBatch(
        input_ids=tensor(tokens, torch.int64).unsqueeze(0),
        position_ids=tensor(positions, torch.int64).unsqueeze(0),
        packing=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        rows=tensor(row_index, torch.int64),
        support=support,
        advantages=tensor(sequences.advantages[sequence], torch.float32),
        weights=token_weights(
            tensor(sequence, torch.int64),
            tensor(response_lengths, torch.int64),
            aggregation=loss.aggregation,
            global_tokens=int(response_lengths[minibatch].sum()),
            global_sequences=len(minibatch),
            fixed_length=loss.fixed_length,
        ),
        sequence=tensor(sequence, torch.int64),
        local_sequence=tensor(
            np.repeat(np.arange(len(members)), response_lengths[members]), torch.int64
        ),
        num_sequences=len(members),
    )
