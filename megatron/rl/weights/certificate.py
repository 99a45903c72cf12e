# SPDX-License-Identifier: Apache-2.0
"""The log-prob probe: the engine and the policy say the same of fixed tokens, or the run ends.

Digests prove that the engine holds the bytes that were sent. They cannot prove that what was sent
is the policy: q, k and v joined in another order, or experts under each other's names, arrive
intact. So after an update every engine scores a few fixed sequences, the policy scores them with
its own forward pass, and the two are compared token by token.

The sequences are random tokens of the whole vocabulary: they reach embedding rows and experts that
sampled text would not, and need no data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from megatron.rl.batch import MinibatchSize, Sequences, pack, plan_micro_batches
from megatron.rl.metrics import gather_records
from megatron.rl.parallel import ParallelConfig, context_shard
from megatron.rl.policy.head import FusedHead
from megatron.rl.policy.model import is_last_stage
from megatron.rl.policy.trained_model import TrainedModel
from megatron.rl.rollout.errors import WeightsMismatch
from megatron.rl.rollout.topk_columns import TopKColumns
from pdm import PolicyLossConfig

PROBE_SEED = 20_250_101

# Largest mean |log pi - log mu| of a right engine, in nats, by the engine's precision. Float32
# differs by rounding alone (5e-7 seen), bfloat16 by routers that pick other experts (0.01), FP8 by
# its own rounding of the weights (0.09); wrong weights move random tokens by tenths of a nat.
DEFAULT_TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.25, "block_fp8": 0.5}
# Between two updates the deviation may grow to so many times the last one, and a little. Training
# moves it slowly; what breaks on the way makes it jump.
MAX_GROWTH = 2.0
GROWTH_SLACK = 0.01

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class ProbeResult:
    """|log pi - log mu| in nats over the probe's tokens: over all engines, and the worst engine."""

    mean: float
    max: float
    tokens: int
    worst_engine: int


class Probe:
    """Fixed sequences, and the policy's word on them. Every rank holds one."""

    def __init__(
        self,
        policy: TrainedModel,
        layout: ParallelConfig,
        *,
        engines: int,
        sequences: int,
        tokens: int,
    ) -> None:
        self._policy = policy
        self._layout = layout
        self._engines = engines
        vocab_size = policy.architecture.vocab_size
        self._tokens = probe_tokens(sequences, tokens, vocab_size)
        # No mask and zero advantages: the pass is there for its log-probs only.
        self._head = FusedHead(PolicyLossConfig(mask="none"), vocab_size, temperature=1.0)

    @property
    def sequences(self) -> list[NDArray[np.int32]]:
        """What every engine is asked to score."""
        return list(self._tokens)

    def compare(self, scores: Mapping[int, Sequence[Scores]]) -> ProbeResult:
        """Compare every engine's log-probs with the policy's. Collective over all ranks.

        Args:
            scores: of the engines that this rank owns, by engine number: for each sequence the
                log-prob of every token but the first.
        """
        deviations = self._deviations(self._share(scores))
        per_engine = deviations.reshape(self._engines, -1)
        # NaN counts as the worst: argmax finds it.
        means = per_engine.mean(axis=1)
        return ProbeResult(
            mean=float(np.max(means)),
            max=float(np.max(deviations)),
            tokens=deviations.size,
            worst_engine=int(np.argmax(means)),
        )

    def _share(self, scores: Mapping[int, Sequence[Scores]]) -> NDArray[np.float32]:
        """Give every rank the scores of all engines ``[E, sequences, tokens - 1]``."""
        count, length = self._tokens.shape
        table = torch.zeros(self._engines, count, length - 1, dtype=torch.float32)
        for engine, rows in scores.items():
            table[engine] = torch.from_numpy(np.stack(list(rows)))
        dist.all_reduce(table)  # each engine's row is one rank's, so the sum only adds zeros
        return table.numpy()

    def _deviations(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return |log pi - log mu|, engine by engine, on every rank."""
        sequences = self._as_sequences(scores)
        members = np.arange(len(sequences))
        plan = plan_micro_batches(
            sequences.input_lengths,
            members,
            data_parallel=self._layout.data,
            max_tokens=max(1024, self._tokens.shape[1]),
            count_multiple=self._layout.micro_batch_multiple,
        )
        micro_batches = [
            pack(
                sequences,
                mine,
                minibatch=MinibatchSize.of(sequences.response_lengths),
                loss=self._head.loss,
                pad_multiple=self._policy.input_multiple,
                device=self._policy.device,
                context=context_shard(),
            )
            for mine in plan[parallel_state.get_data_parallel_rank()]
        ]
        records = self._policy.score(micro_batches, self._head)
        flat = torch.zeros(scores.size, dtype=torch.float64)
        if is_last_stage():
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            tokens = gather_records(records, group)
            difference = tokens.policy_log_prob.double() - tokens.behavior_log_prob.double()
            # Ranks and micro-batches mix the order of tokens, not which engine they belong to.
            order = torch.argsort(tokens.sequence, stable=True)
            flat = difference.abs()[order].cpu()
        if self._layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            flat = flat.to(self._policy.device)
            dist.broadcast(
                flat, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group
            )
        return flat.cpu().numpy()

    def _as_sequences(self, scores: NDArray[np.float32]) -> Sequences:
        """The probe as a rollout batch: one prompt token each, the engine's word as behavior."""
        tokens = np.tile(self._tokens, (self._engines, 1))
        count, length = tokens.shape
        num_tokens = count * (length - 1)
        return Sequences(
            number=np.arange(count),
            prompt_tokens=np.ascontiguousarray(tokens[:, 0]),
            prompt_offsets=np.arange(count + 1),
            response_tokens=np.ascontiguousarray(tokens[:, 1:]).reshape(-1),
            response_offsets=np.arange(count + 1) * (length - 1),
            group=np.arange(count),
            advantages=np.zeros(count, dtype=np.float32),
            log_probs=scores.reshape(-1),
            topk=TopKColumns.encode(
                np.zeros((num_tokens, 0), dtype=np.int64),
                np.zeros((num_tokens, 0), dtype=np.float32),
                self._policy.architecture.vocab_size,
            ),
            policy_versions=np.zeros(num_tokens, dtype=np.int32),
        )


def probe_tokens(sequences: int, tokens: int, vocab_size: int) -> NDArray[np.int32]:
    """Return the probe's random sequences ``[sequences, tokens]``, the same in every run."""
    generator = np.random.default_rng(PROBE_SEED)
    return generator.integers(0, vocab_size, (sequences, tokens)).astype(np.int32)


def default_tolerance(precision: str, last: ProbeResult | None) -> float:
    """Return the largest mean deviation to accept, given that of the last update, if any."""
    tolerance = DEFAULT_TOLERANCE[precision]
    if last is None:
        return tolerance
    return min(tolerance, MAX_GROWTH * last.mean + GROWTH_SLACK)


def require_match(result: ProbeResult, tolerance: float, version: int) -> None:
    """Raise WeightsMismatch when the probe's mean deviation exceeds the tolerance, or is NaN."""
    if not result.mean <= tolerance:
        raise WeightsMismatch(
            f"engine {result.worst_engine} and the policy disagree about the weights of version "
            f"{version}: mean |log-prob difference| {result.mean:.3g} nats (max {result.max:.3g}) "
            f"over {result.tokens} fixed tokens, expected at most {tolerance:.3g}. The engine does "
            "not hold the policy's weights; if its precision explains it, set "
            "bridge.probe_tolerance"
        )
