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
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.rl.batch import MicroBatch, pack
from megatron.rl.batch_sampler import BatchSampler, Sampled, sequences_of
from megatron.rl.checkpoint.agreement import from_rank_0
from megatron.rl.checkpoint.file_names import EXTRA_FOLDER
from megatron.rl.checkpoint.reader import FoundCheckpoint
from megatron.rl.checkpoint.run_state import Plain, RunState
from megatron.rl.checkpoint.writer import WriteFile
from megatron.rl.config import Config
from megatron.rl.data.prompt_source import PromptState
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
from megatron.rl.metrics_log import LogPosition, MetricsLog
from megatron.rl.mismatch import MismatchSplit
from megatron.rl.model.architecture import read_architecture
from megatron.rl.open_batch import Metrics, OpenBatch, take_over
from megatron.rl.parallel import context_shard
from megatron.rl.peak_memory import peak_bytes
from megatron.rl.policy.head import TokenRecord
from megatron.rl.policy.model import is_last_stage
from megatron.rl.policy.trained_model import TrainedModel
from megatron.rl.rollout.from_config import run_topology
from megatron.rl.rollout_metrics import heldout_metrics, mean_reward
from megatron.rl.run_folder import shared_folder
from megatron.rl.sampler import Sampler
from megatron.rl.sampling_shares import share_of_sampling
from megatron.rl.shared_gpus import SharedGpus
from megatron.rl.step_metrics import gather_tokens, step_metrics
from megatron.rl.stop_request import Preempted, StopRequest
from megatron.rl.weights.bridge import WeightBridge


@dataclass(frozen=True)
class SessionState:
    """Where a session stands; see :class:`RunState` for ``prompts`` and ``minibatch_order``."""

    log: LogPosition
    prompts: dict[str, Plain]
    minibatch_order: dict[str, Plain]


class RolloutSession:
    """One run's rollouts on this rank. All methods but :meth:`close` are collective.

    Args:
        note: is told what a user may want to know.
        stop: may interrupt sampling; None where nobody stops the run but by ending it.
    """

    def __init__(
        self, config: Config, note: Callable[[str], None], stop: StopRequest | None = None
    ) -> None:
        self._config = config
        self._note = note
        self._stop = stop or StopRequest()
        self._topology = run_topology(config)
        self._order = np.random.default_rng([config.run.seed, 0])
        self._sampler: Sampler | None = None
        self._batch_sampler: BatchSampler | None = None
        self._log: MetricsLog | None = None
        self._batch: OpenBatch | None = None
        self._exit = contextlib.ExitStack()

    @property
    def num_engines(self) -> int:
        """Engines of the whole run."""
        return len(self._topology.engines)

    def start(self, folder: Path, position: LogPosition | None = None) -> Path:
        """Open the run folder and start the engine of this rank, which loads meanwhile.

        Args:
            folder: rank 0's decides, and is returned.
            position: where the log of a run that continues stands; None: at its start.
        """
        config, rollout = self._config, self._config.rollout
        folder = shared_folder(folder)
        vocab_size = read_architecture(config.model.path).vocab_size
        if dist.get_rank() == 0:
            self._log = self._exit.enter_context(MetricsLog(folder, position, self._note))
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
        engine = None if self._sampler is None else self._sampler.engine
        self._gpus = SharedGpus(policy, engine, shared=self._config.rollout.sleep)
        if self._sampler is not None:
            self._sampler.wait_ready()
        self._exchange.any_rank(False)  # ranks without an engine wait for as long as those with one
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

    def resume(self, run: RunState | None, *, evaluated: int, pending: bool) -> None:
        """Continue where a run stood; to be called after :meth:`start`.

        Args:
            run: None: at the start, whatever a run before this one has left in the folder.
            evaluated: rollout batches before its newest evaluation, -1 for none.
            pending: the next batch was sampled; :meth:`resume_batch` takes it over.
        """
        prompts: PromptState | None = None
        if run is not None:
            self._order.bit_generator.state = dict(run.minibatch_order)
            prompts = cast(PromptState, dict(run.prompts))
        if self._sampler is not None:
            trained = 0 if run is None else run.rollout + pending
            self._sampler.resume(prompts, trained=trained, evaluated=evaluated)

    def resume_batch(self, saved: FoundCheckpoint, epochs: int) -> None:
        """Take over the batch that a run before this one was training on; see pending_batch.py.

        Args:
            epochs: passes over it that are finished.
        """
        own = None if self._sampler is None else self._sampler.place.number
        self._batch = batch = take_over(
            saved.path / EXTRA_FOLDER,
            self._config,
            engine=own,
            engines=self.num_engines,
            order=self._order_state(),
            device=self._policy.device,
        )
        if self._sampler is not None and batch.record is not None and len(batch.record):
            info = dataclasses.replace(batch.record.info, engine=self._sampler.place.number)
            self._sampler.write_later(dataclasses.replace(batch.record, info=info))
        self.rest_engine()
        for _ in range(epochs):
            plan_epoch(SequenceTable.join(batch.tables), self._config, self._order)

    def state(self) -> SessionState:
        """Return what a resumed run continues from, between two optimizer steps. Collective.

        Raises:
            RankFailed: the metrics so far cannot be written.
        """
        log = self._log
        position = from_rank_0(lambda: log.position() if log is not None else LogPosition())
        own = None if self._sampler is None else self._sampler.prompts.state()
        # All owners draw the same stream.
        prompts = self._exchange.gather_reports(own)[0]
        order = self._order_state() if self._batch is None else self._batch.order
        return SessionState(position, cast(dict[str, Plain], dict(prompts)), order)

    def pending_files(self) -> dict[str, WriteFile]:
        """Return this rank's files of the batch that is being trained on, for a checkpoint."""
        return self._open_batch().files(self._config.parallel)

    @property
    def batch_open(self) -> bool:
        """Whether a batch was sampled that is not finished."""
        return self._batch is not None

    @property
    def steps_on_batch(self) -> int:
        """Optimizer steps that were taken on the batch."""
        return len(self._open_batch().steps)

    def log(self, kind: str, number: int, metrics: Metrics) -> None:
        """Log what the owner of the loop has measured. On rank 0; others need not call it."""
        if self._log is not None:
            self._log.write(kind, number, metrics)

    def collect(self, number: int) -> float:
        """Sample rollout batch ``number`` with the weights that were sent last.

        Returns:
            The mean reward of all that was sampled.

        Raises:
            Preempted: on every rank; nothing was sampled, the prompts are those of the next try.
        """
        assert self._batch is None, "the batch before has to be finished first"
        started = time.perf_counter()
        self._gpus.to_engine()
        cursor = None if self._sampler is None else self._sampler.prompts.state()
        try:
            sampled = self._sample(number)
        except Preempted:
            if self._sampler is not None and cursor is not None:
                self._sampler.prompts.load_state(cursor)
            raise
        reports = self._exchange.gather_reports(None if sampled is None else sampled.report)
        self.rest_engine()
        self._batch = OpenBatch(
            number,
            reports,
            [report.table for report in reports],
            None if sampled is None else sampled.record,
            self._order_state(),
            started,
            time.perf_counter(),
        )
        return mean_reward(reports)

    def plan_epoch(self, planner: Planner | None = None) -> EpochPlan:
        """Plan the next pass over the batch and bring its sequences to the ranks that train."""
        batch = self._open_batch()
        started = time.perf_counter()
        table = SequenceTable.join(batch.tables)
        plan = plan_epoch(table, self._config, self._order, planner)
        sampled = None if batch.record is None else sequences_of(batch.record)
        batch.sequences = self._exchange.distribute(sampled, batch.tables, plan.replica)
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
        metrics = step_metrics(records, losses, batch.split) | further
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
            self._gpus.to_engine()
            update = self._bridge.update(batch.number).metrics()
        finished = time.perf_counter()
        times = {
            "time/exchange_s": batch.exchange_s,
            "time/train_s": updating - batch.collected - batch.exchange_s,
            "time/weights_s": finished - updating,
            "time/total_s": finished - batch.started,
        }
        peak = self._exchange.largest(peak_bytes(self._policy.device))
        memory = {"memory/peak_gib": peak / 2**30}
        metrics = batch.metrics(times | update | memory, self._config)
        if self._log is not None:
            self._log.write("rollout", batch.number, metrics)
        self._batch = None
        return metrics

    def evaluate(self, number: int) -> Metrics:
        """Sample the held-out prompts and the benchmarks after ``number`` rollout batches.

        Returns:
            The metrics, which are logged; see ``heldout_metrics`` and ``training_metrics``.
        """
        self._gpus.to_engine()
        own = self._on_engines(lambda sampler: sampler.sample_heldout(number), number)
        metrics = heldout_metrics(self._exchange.gather_reports(own))
        for name in bench_names(self._config.eval.benches):
            metrics |= self._evaluate_bench(name, number)
        if self._log is not None:
            self._log.write("eval", number, metrics)
        return metrics

    def rest_engine(self) -> None:
        """Give the GPUs to the policy, where engine and policy share them."""
        self._gpus.to_policy()

    def end_sampling(self) -> None:
        """End the engines for good and give the policy what it needs to be saved. Collective."""
        self._gpus.end_engine()

    def close(self) -> None:
        """End the engine of this rank and close the log. Safe to call twice."""
        self._exit.close()

    def _on_engines[Result](self, work: Callable[[Sampler], Result], version: int) -> Result | None:
        """Do this rank's share of some sampling, with the weights of ``version``."""
        sampler = self._sampler
        return share_of_sampling(
            None if sampler is None else partial(work, sampler),
            self._exchange,
            self._stop,
            send_weights=partial(self._bridge.update, version),
            note=self._note,
        )

    def _order_state(self) -> dict[str, Plain]:
        return dict(self._order.bit_generator.state)

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

    def _open_batch(self) -> OpenBatch:
        assert self._batch is not None, "no rollout batch has been collected"
        return self._batch

    def _mismatch_split(self, scoring: PlannedStep, version: int) -> MismatchSplit:
        """Start on a rollout batch, before its first step; scores all of it if configured so."""
        if self._config.train.mismatch == "first_minibatch":
            return MismatchSplit(version)
        records = self._policy.score(self.micro_batches(scoring))
        return MismatchSplit(version, gather_tokens(records) if is_last_stage() else None)
