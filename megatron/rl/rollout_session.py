# SPDX-License-Identifier: Apache-2.0
"""Everything of a run but the optimizer steps: rollouts, their exchange, weight updates, metrics.

Whoever owns the loop (``trainer.py``, or Megatron's own through ``stock_session.py``) calls, on
every rank and in this order: :meth:`RolloutSession.start`, :meth:`~RolloutSession.connect`, then
for each rollout batch :meth:`~RolloutSession.collect`, for each epoch on it
:meth:`~RolloutSession.plan_epoch`, for each optimizer step
:meth:`~RolloutSession.micro_batches` and :meth:`~RolloutSession.finish_step`, and at last
:meth:`~RolloutSession.finish_batch`.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.rl.batch import MicroBatch, Sequences, pack
from megatron.rl.batch_draft import BatchReport
from megatron.rl.batch_sampler import BatchSampler, Sampled
from megatron.rl.config import Config
from megatron.rl.dynamic_sampling import SamplingRound, sample_rounds
from megatron.rl.epoch_plan import (
    EpochPlan,
    PlannedStep,
    Planner,
    plan_epoch,
    plan_scoring,
    skip_epochs,
)
from megatron.rl.errors import UserError
from megatron.rl.evaluation.in_training import bench_names, measure_shares, training_metrics
from megatron.rl.exchange import Exchange, SequenceTable, TopKForm
from megatron.rl.metrics import gather_records, loss_metrics, staleness_metrics
from megatron.rl.mismatch import MismatchSplit
from megatron.rl.model.architecture import read_architecture
from megatron.rl.parallel import context_shard
from megatron.rl.policy.head import TokenRecord
from megatron.rl.policy.model import is_last_stage
from megatron.rl.policy.trained_model import TrainedModel
from megatron.rl.rollout.errors import WeightsLost
from megatron.rl.rollout.from_config import run_topology
from megatron.rl.rollout_metrics import heldout_metrics, mean_reward, rollout_metrics
from megatron.rl.run_folder import MetricsLog, shared_folder
from megatron.rl.sampler import Sampler
from megatron.rl.weights.bridge import WeightBridge

Metrics = dict[str, Any]
Result = TypeVar("Result")


@dataclass
class _Batch:
    """The rollout batch that is trained on; times are of ``time.perf_counter``."""

    number: int
    reports: list[BatchReport]
    sampled: Sequences | None
    """What the engine of this rank sampled; None on ranks without one."""
    started: float
    collected: float
    exchange_s: float = 0.0
    sequences: Sequences | None = None
    """What this rank trains on, in the epoch that was planned last."""
    split: MismatchSplit | None = None
    steps: list[Metrics] = field(default_factory=list)

    @property
    def tables(self) -> list[SequenceTable]:
        return [report.table for report in self.reports]


class RolloutSession:
    """One run's rollouts on this rank. All methods but :meth:`close` are collective.

    Args:
        note: is told what a user may want to know.
    """

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        self._config = config
        self._note = note
        self._topology = run_topology(config)
        self._order = np.random.default_rng([config.run.seed, 0])
        self._sampler: Sampler | None = None
        self._batch_sampler: BatchSampler | None = None
        self._log: MetricsLog | None = None
        self._batch: _Batch | None = None
        self._engine_awake = True
        self._exit = contextlib.ExitStack()

    @property
    def num_engines(self) -> int:
        """Engines of the whole run."""
        return len(self._topology.engines)

    def start(self, folder: Path) -> Path:
        """Open the run folder and start the engine of this rank, which loads meanwhile.

        Args:
            folder: rank 0's decides, and is returned.
        """
        config, rollout = self._config, self._config.rollout
        folder = shared_folder(folder)
        vocab_size = read_architecture(config.model.path).vocab_size
        if dist.get_rank() == 0:
            self._log = self._exit.enter_context(MetricsLog(folder))
        form = TopKForm(rollout.top_logprobs, vocab_size, rollout.topk_precision)
        place = self._topology.engine_of(dist.get_rank())
        if place is not None:
            self._sampler = Sampler(config, folder, self._topology, place, vocab_size, self._note)
            self._exit.callback(self._sampler.close)
            self._batch_sampler = BatchSampler(config, self._sampler, form)
        self._exchange = Exchange(self._topology, config.parallel, form)
        return folder

    def connect(self, policy: TrainedModel, version: int | None = None) -> None:
        """Wait for the engines and prove that they hold the policy's weights.

        Args:
            version: under which the weights are sent first. None: the policy has those of the
                checkpoint, which the engines have read themselves.
        """
        self._policy = policy
        if self._config.rollout.sleep:
            policy.offload()  # the engine is the first to work
        if self._sampler is not None:
            self._sampler.wait_ready()
        self._exchange.any_rank(False)  # ranks without an engine wait for as long as those with one
        engine = None if self._sampler is None else self._sampler.engine
        self._bridge = WeightBridge(self._config, policy, self._topology, engine)
        if version is not None:
            self._bridge.update(version)
        elif self._config.bridge.quantization == "none":
            self._bridge.check_start()
        else:
            self._bridge.update(0)  # engines read the unquantised checkpoint

    def skip(self, batches: int) -> None:
        """Continue behind rollout batches that a run before this one has trained on.

        Raises:
            UserError: with dynamic sampling nobody knows how many prompts these batches took.
        """
        if batches and self._config.rollout.refill_rounds:
            raise UserError(
                f"rollout.refill_rounds is {self._config.rollout.refill_rounds}, expected 0 in a "
                f"run that goes on behind {batches} rollout batches: how many prompts these have "
                "drawn is not known. Set it to 0, or start a new run from the checkpoint's weights"
            )
        if self._sampler is not None:
            self._sampler.skip(batches)
        skip_epochs(self._config.rollout.prompts, self._order, batches * self._config.train.epochs)

    def collect(self, number: int) -> float:
        """Sample rollout batch ``number`` with the weights that were sent last.

        Returns:
            The mean reward of all that was sampled.
        """
        assert self._batch is None, "the batch before has to be finished first"
        started = time.perf_counter()
        self._wake_engine()
        sampled = self._sample(number)
        reports = self._exchange.gather_reports(None if sampled is None else sampled.report)
        self.rest_engine()
        sequences = None if sampled is None else sampled.sequences
        self._batch = _Batch(number, reports, sequences, started, time.perf_counter())
        return mean_reward(reports)

    def plan_epoch(self, planner: Planner | None = None) -> EpochPlan:
        """Plan the next pass over the batch and bring its sequences to the ranks that train."""
        batch = self._open_batch()
        started = time.perf_counter()
        table = SequenceTable.join(batch.tables)
        plan = plan_epoch(table, self._config, self._order, planner)
        batch.sequences = self._exchange.distribute(batch.sampled, batch.tables, plan.replica)
        batch.exchange_s += time.perf_counter() - started
        if batch.split is None:
            scoring = plan_scoring(table, self._config, plan.replica)
            batch.split = self._mismatch_split(scoring, version=batch.number - 1)
        return plan

    def micro_batches(self, step: PlannedStep) -> list[MicroBatch]:
        """Pack this rank's share of a step of the epoch that was planned last."""
        config, sequences = self._config, self._open_batch().sequences
        assert sequences is not None, "no epoch is planned"
        return [
            pack(
                sequences,
                sequences.places_of(mine),
                minibatch=step.size,
                loss=config.loss,
                pad_multiple=self._policy.input_multiple,
                device=self._policy.device,
                context=context_shard(),
            )
            for mine in step.micro_batches[parallel_state.get_data_parallel_rank()]
        ]

    def finish_step(
        self,
        number: int,
        records: list[TokenRecord],
        losses: list[Tensor],
        further: Metrics,
    ) -> Metrics:
        """Compute and log the metrics of an optimizer step; every rank gets them.

        Args:
            number: of the step within the run, from 1.
            records, losses: one a micro-batch, on the last pipeline stage.
            further: what the owner of the loop knows of the step.
        """
        batch = self._open_batch()
        assert batch.split is not None, "no epoch is planned"
        metrics = self._reduce(records, losses, batch.split) | further
        batch.steps.append(metrics)
        if self._log is not None:
            self._log.write("step", number, metrics)
        return metrics

    def finish_batch(self, *, send_weights: bool = True) -> Metrics:
        """Give the engines the weights that the batch led to; log and return its metrics."""
        batch = self._open_batch()
        updating = time.perf_counter()
        update: Metrics = {}
        if send_weights:
            self._wake_engine()
            update = self._bridge.update(batch.number).metrics()
        finished = time.perf_counter()
        times = {
            "time/exchange_s": batch.exchange_s,
            "time/train_s": updating - batch.collected - batch.exchange_s,
            "time/weights_s": finished - updating,
            "time/total_s": finished - batch.started,
        }
        metrics = _batch_metrics(batch, times | update, self._config)
        if self._log is not None:
            self._log.write("rollout", batch.number, metrics)
        self._batch = None
        return metrics

    def evaluate(self, number: int) -> Metrics:
        """Sample the held-out prompts and the benchmarks after ``number`` rollout batches.

        Returns:
            The metrics, which are logged; see ``heldout_metrics`` and ``training_metrics``.
        """
        self._wake_engine()
        own = self._on_engines(lambda sampler: sampler.sample_heldout(number), number)
        metrics = heldout_metrics(self._exchange.gather_reports(own))
        for name in bench_names(self._config.eval.benches):
            metrics |= self._evaluate_bench(name, number)
        if self._log is not None:
            self._log.write("eval", number, metrics)
        return metrics

    def rest_engine(self) -> None:
        """Give the GPUs to the policy, where engine and policy share them."""
        if not self._config.rollout.sleep or not self._engine_awake:
            return
        if self._sampler is not None:
            self._sampler.engine.sleep()
        self._engine_awake = False
        dist.barrier()
        self._policy.restore()

    def close(self) -> None:
        """End the engine of this rank and close the log. Safe to call twice."""
        self._exit.close()

    def _on_engines(self, work: Callable[[Sampler], Result], version: int) -> Result | None:
        """Do this rank's share of some sampling, with the weights of ``version``.

        An engine that was restarted without its weights (where the transport keeps no copy of
        them) makes all ranks send them again; then the engines that failed repeat their share.
        """
        result: Result | None = None
        waiting = self._sampler is not None
        while True:
            if waiting and self._sampler is not None:
                try:
                    result, waiting = work(self._sampler), False
                except WeightsLost as error:
                    self._note(str(error))
            if not self._exchange.any_rank(waiting):
                return result
            self._bridge.update(version)

    def _evaluate_bench(self, name: str, number: int) -> Metrics:
        own = self._on_engines(lambda sampler: sampler.sample_bench(name, number), number)
        shares = self._exchange.gather_reports(own)
        return training_metrics(name, measure_shares(shares), shares)

    def _sample(self, number: int) -> Sampled | None:
        """Sample the rounds of a rollout batch; returns the share of this rank's engine."""
        rollout = self._config.rollout
        shares = self._topology.split(rollout.prompts, "rollout.prompts")
        wanted = [share.stop - share.start for share in shares]

        def sample(this: SamplingRound) -> list[int]:
            def own_share(_: Sampler) -> int:
                assert self._batch_sampler is not None
                return self._batch_sampler.sample_round(number, this)

            return self._exchange.gather_reports(self._on_engines(own_share, number - 1))

        counts = sample_rounds(wanted, rollout.refills, sample).tolist()
        if rollout.refills and rollout.refill_policy == "keep":
            counts = wanted
        if self._batch_sampler is None:
            return None
        return self._batch_sampler.finish_batch(number, counts)

    def _open_batch(self) -> _Batch:
        assert self._batch is not None, "no rollout batch has been collected"
        return self._batch

    def _mismatch_split(self, scoring: PlannedStep, version: int) -> MismatchSplit:
        """Start on a rollout batch, before its first step; scores all of it if configured so."""
        if self._config.train.mismatch == "first_minibatch":
            return MismatchSplit(version)
        records = self._policy.score(self.micro_batches(scoring))
        return MismatchSplit(version, _gather(records) if is_last_stage() else None)

    def _reduce(
        self, records: list[TokenRecord], losses: list[Tensor], split: MismatchSplit
    ) -> Metrics:
        """Compute metrics on the last pipeline stage and give them to the others."""
        metrics: list[Metrics] = [{}]
        if is_last_stage():
            tokens = _gather(records)
            steps = split.steps_measured
            metrics[0] = loss_metrics(tokens) | split.measure(tokens)
            metrics[0] |= staleness_metrics(tokens, split.version, steps)
            metrics[0]["loss"] = _mean_loss(losses, tokens.sequence.numel())
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(metrics, src=last, group=group)
        return metrics[0]

    def _wake_engine(self) -> None:
        """Give the GPUs to the engine, where engine and policy share them."""
        if self._engine_awake:
            return
        self._policy.offload()
        dist.barrier()  # an engine may use the GPUs of several ranks
        if self._sampler is not None:
            self._sampler.engine.wake()
        self._engine_awake = True


def _data_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def _gather(records: list[TokenRecord]) -> TokenRecord:
    return gather_records(records, _data_group())


def _mean_loss(losses: list[Tensor], num_tokens: int) -> float:
    """Return what the optimizer step minimised: the sum over all ranks, divided once."""
    total = torch.stack(losses).double().sum()
    dist.all_reduce(total, group=_data_group())
    return float(total) / max(num_tokens, 1)


def _batch_metrics(batch: _Batch, measured: Metrics, config: Config) -> Metrics:
    steps: Sequence[Metrics] = batch.steps
    tokens = sum(step.get("tokens", 0) for step in steps)
    vetoed = sum(step.get("vetoed_tokens", 0) for step in steps)
    kl = sum(step.get("ppo_kl", 0.0) * step.get("tokens", 0) for step in steps)
    metrics: Metrics = rollout_metrics(batch.reports, config) | measured
    return metrics | {
        "optimizer_steps": len(steps),
        "clip_fraction": vetoed / max(tokens, 1),
        "ppo_kl": kl / max(tokens, 1),
        "tokens_per_s/train": tokens / measured["time/train_s"],
        "tokens_per_s": metrics["response_tokens"] / measured["time/total_s"],
    }
