# SPDX-License-Identifier: Apache-2.0
"""Rollouts for Megatron's own training loop: the state behind ``rl_utils``.

``train()`` in ``megatron/training/training.py`` asks for a data iterator before every iteration. An
iteration is one optimizer step on one minibatch; every so many of them, when a rollout batch has
been trained on, the weights go to the engines and the next batch is sampled.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, get_tensorboard_writer, get_timers

from megatron.rl import cpu_backend
from megatron.rl.config import Config
from megatron.rl.epoch_plan import EpochPlan
from megatron.rl.errors import UserError
from megatron.rl.megatron_arguments import config_from_arguments
from megatron.rl.megatron_pretrain import MinibatchIterator, chunk_iterators, plan_by_count
from megatron.rl.model.architecture import read_architecture
from megatron.rl.policy.from_config import policy_head
from megatron.rl.policy.trained_model import TrainedModel
from megatron.rl.rl_profiling import RL_LOGGABLE_TIMER_NAMES, TIMER_LEVEL
from megatron.rl.rollout_session import Metrics, RolloutSession
from megatron.rl.run_folder import create_run_folder

# Where Megatron's TensorBoard has what is in metrics.jsonl.
_PREFIX = "rl"

_current: "StockSession | None" = None


def session_of(
    model: Sequence[DistributedDataParallel], optimizer: Any, iteration: int
) -> "StockSession":
    """Return the session of this process; the first call starts it. Collective then."""
    global _current
    if _current is None:
        session = StockSession(get_args())
        _current = session  # close() ends what a failed start has left
        session.start(model, optimizer, iteration)
    return _current


def running_session() -> "StockSession | None":
    """Return the session of this process, if one has been started and not closed."""
    return _current


def close() -> None:
    """End the engine of this rank, whatever state the loop is in. Not collective; repeatable."""
    global _current
    session, _current = _current, None
    if session is not None:
        session.close()


class StockSession:
    """A :class:`RolloutSession` that is driven by Megatron's iteration numbers."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = config_from_arguments(args)
        device: Literal["cpu", "cuda"] = "cpu" if cpu_backend.is_installed() else "cuda"
        run = dataclasses.replace(config.run, device=device)
        self._config: Config = dataclasses.replace(config, run=run)
        self._args = args
        self._rollouts = RolloutSession(self._config, _note)
        samples = config.rollout.prompts * config.rollout.group_size
        self._steps_per_epoch = samples // args.global_batch_size
        self._steps_per_batch = self._steps_per_epoch * config.train.epochs
        self._plan: EpochPlan | None = None
        self._iterator: MinibatchIterator | None = None
        self._step = 0
        self._learning_rate = 0.0
        self._batch_open = False
        self._heldout: tuple[int, Metrics] | None = None
        self._last: Metrics = {}
        self._tokens: list[int] = []

    def start(
        self, model: Sequence[DistributedDataParallel], optimizer: Any, iteration: int
    ) -> None:
        """Start engines and logs, and prove that the engines have the weights of ``model``."""
        folder = Path(self._config.run.folder)
        if dist.get_rank() == 0:
            folder = create_run_folder(self._config)
        folder = self._rollouts.start(folder)
        if dist.get_rank() == 0:
            _note(f"run folder: {folder}")
        architecture = read_architecture(self._config.model.path)
        head = policy_head(self._config, architecture.vocab_size)
        policy = TrainedModel(architecture, self._config.parallel, head, model, optimizer)
        done = iteration // self._steps_per_batch
        loaded = iteration or self._args.load or self._args.pretrained_checkpoint
        self._policy = policy
        self._rollouts.connect(policy, version=done if loaded else None)
        self._rollouts.skip(done)

    def iterator(self, iteration: int, chunks: int) -> MinibatchIterator | list[MinibatchIterator]:
        """Return the micro-batches of an iteration; samples first where a batch begins.

        A run that resumes within a rollout batch samples that batch again, and trains on what is
        left of it.
        """
        self.settle()
        batch, step_in_batch = divmod(iteration, self._steps_per_batch)
        epoch, step = divmod(step_in_batch, self._steps_per_epoch)
        if step_in_batch == 0 or not self._batch_open:
            self._collect(batch + 1)
            for _ in range(epoch + 1):  # all but one have been made by a run before this one
                self._plan_epoch()
        elif step == 0:
            self._plan_epoch()
        assert self._plan is not None
        self._step = iteration + 1
        self._learning_rate = self._policy.optimizer.param_groups[0]["lr"]
        with _timed("rl/packing"):
            micro_batches = self._rollouts.micro_batches(self._plan.steps[step])
        iterators = chunk_iterators(micro_batches, chunks)
        self._iterator = iterators[-1] if isinstance(iterators, list) else iterators
        return iterators

    def check(self, **settings: int) -> None:
        """Refuse numbers that are not those of the command line, which the session is built on."""
        for name, value in settings.items():
            expected = getattr(self._args, name)
            if value != expected:
                raise UserError(f"{name} is {value}, but the command line says {expected}")

    def settle(self, returned: MinibatchIterator | list[MinibatchIterator] | None = None) -> None:
        """Compute and log the metrics of the last step, unless that has been done. Collective.

        Args:
            returned: the newest iterator, where the caller has it.
        """
        if self._iterator is None:
            return
        newest = returned[-1] if isinstance(returned, list) else returned
        assert newest is None or newest is self._iterator, "not the iterator that was made last"
        iterator, self._iterator = self._iterator, None
        further = {
            "learning_rate": self._learning_rate
        }  # of this step; Megatron's log shows the next
        step = self._rollouts.finish_step(self._step, iterator.records, iterator.losses, further)
        self._tokens.append(step.get("tokens", 0))
        self._last |= step
        self._write("step", self._step, step)

    def evaluate(self, iteration: int, *, write: bool) -> Metrics:
        """Send the weights to the engines and sample the held-out prompts."""
        self.settle()
        self._finish_batch(send_weights=True)
        number = math.ceil(iteration / self._steps_per_batch)
        if self._heldout is None or self._heldout[0] != number:
            self._heldout = (number, self._rollouts.evaluate(number))
        self._rollouts.rest_engine()  # a checkpoint may be next: the optimizer has to be back
        if write:
            self._write("eval", iteration, self._heldout[1])
        return self._heldout[1]

    def summary(self, elapsed_s: float) -> Metrics:
        """Return the numbers of the log line: of the newest step and the newest rollout batch.

        Args:
            elapsed_s: seconds an iteration, sampling included, since the last summary.
        """
        self.settle()
        tokens, self._tokens = self._tokens, []
        shown = ("reward", "loss", "ppo_kl", "clip_fraction", "divergence/mean", "entropy")
        summary = {name: self._last[name] for name in shown if name in self._last}
        if tokens and elapsed_s > 0:
            summary["response tokens/s"] = sum(tokens) / len(tokens) / elapsed_s
        return summary

    def finish(self) -> None:
        """Log what is left to log; the weights stay where they are. Collective."""
        self.settle()
        self._finish_batch(send_weights=False)

    def close(self) -> None:
        """End the engine of this rank and close the log."""
        self._rollouts.close()

    def _collect(self, number: int) -> None:
        self._finish_batch(send_weights=True)
        with _timed("rl/rollout"):
            self._last["reward"] = self._rollouts.collect(number)
        self._batch_open = True

    def _plan_epoch(self) -> None:
        planner = partial(
            plan_by_count,
            data_parallel=self._config.parallel.data,
            count=get_num_microbatches(),
            size=self._args.micro_batch_size,
        )
        with _timed("rl/exchange"):
            self._plan = self._rollouts.plan_epoch(planner)
        if len(self._plan.steps) != self._steps_per_epoch:
            raise RuntimeError(
                f"a rollout batch gave {len(self._plan.steps)} minibatches, Megatron expects "
                f"{self._steps_per_epoch}: whole groups of responses are missing"
            )

    def _finish_batch(self, *, send_weights: bool) -> None:
        if not self._batch_open:
            return
        with _timed("rl/weights"):
            metrics = self._rollouts.finish_batch(send_weights=send_weights)
        self._batch_open = False
        self._write("rollout", self._step, metrics)

    def _write(self, kind: str, iteration: int, metrics: Metrics) -> None:
        """Write metrics to Megatron's TensorBoard, which the last rank has, by iteration."""
        writer = get_tensorboard_writer()
        if writer is None:
            return
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                writer.add_scalar(f"{_PREFIX}/{kind}/{name}", value, iteration)


@contextmanager
def _timed(name: str) -> Iterator[None]:
    """Time a phase under one of RL_LOGGABLE_TIMER_NAMES, which Megatron logs."""
    assert name in RL_LOGGABLE_TIMER_NAMES
    timer = get_timers()(name, log_level=TIMER_LEVEL)
    timer.start()
    try:
        yield
    finally:
        timer.stop()


def _note(message: str) -> None:
    print(f"rl: {message}", flush=True)


def require_own_engine(**settings: Any) -> None:
    """Refuse arguments of Megatron's that ask for rollouts from something else than the engine.

    ``parse_arguments`` refuses their flags by name; a program with a parser of its own may not.
    """
    for name, value in settings.items():
        if value:
            raise UserError(
                f"{name} is {value!r}, expected None or False: rollouts come from the engine of "
                "--pdm-rollout-*, and sequences are always packed. Parse the command line with "
                "megatron.rl.megatron_arguments.parse_arguments, which names the flag"
            )
