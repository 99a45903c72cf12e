# SPDX-License-Identifier: Apache-2.0
"""The training loop: sample, score, take several optimizer steps, hand the weights back.

Every rank runs it. Rank 0 also holds the sampler (engine, prompts, rewards) and the metrics log;
rollout batches travel from it to the other ranks as arrays.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.rl.batch import MicroBatch, Sequences, minibatches, pack, plan_micro_batches
from megatron.rl.config import Config
from megatron.rl.events import EventSink
from megatron.rl.metrics import gather_records, loss_metrics, mismatch_metrics
from megatron.rl.model.architecture import read_architecture
from megatron.rl.model.build import BuildOptions
from megatron.rl.parallel import context_shard
from megatron.rl.policy.head import FusedHead, PolicyHead, ReferenceHead, TokenRecord
from megatron.rl.policy.model import OptimizerSettings, Policy, is_last_stage
from megatron.rl.run_folder import MetricsLog
from megatron.rl.sampler import RolloutBatch, Sampler
from megatron.rl.weights.hf_files import write_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """One run on this rank, from the starting policy to the exported one."""

    def __init__(self, config: Config, folder: Path, events: EventSink) -> None:
        self._config = config
        self._folder = folder
        self._events = events
        self._step = 0
        self._vetoed = 0
        self._tokens = 0
        self._order = np.random.default_rng([config.run.seed, 0])
        self._sampler: Sampler | None = None
        self._log: MetricsLog | None = None
        self._exit = contextlib.ExitStack()

    def run(self) -> None:
        """Train to the end. Everything that was started is ended, whatever happens."""
        with self._exit:
            self._set_up()
            before = self._evaluate(0)
            for number in range(1, self._config.train.rollouts + 1):
                self._train_on_rollout(number)
                every = self._config.eval.every
                if every and number % every == 0 and number < self._config.train.rollouts:
                    self._evaluate(number)
            after = self._evaluate(self._config.train.rollouts) if self._step else before
            if self._config.run.export:
                self._export()
            self._summarize(before, after)

    def _set_up(self) -> None:
        config = self._config
        if dist.get_rank() == 0:
            self._events.send("phase", name="starting the rollout engine and the trainer")
            self._sampler = Sampler(config, self._folder, self._note)
            self._exit.callback(self._sampler.close)
            self._log = self._exit.enter_context(MetricsLog(self._folder))
        architecture = read_architecture(config.model.path)
        dtype = DTYPES[config.model.dtype]
        self._policy = Policy(
            architecture,
            config.parallel,
            BuildOptions(dtype, config.megatron.transformer),
            _optimizer_settings(config),
            _policy_head(config, architecture.vocab_size),
            config.model.path,
        )
        if self._sampler is not None:
            self._sampler.wait_ready()

    def _note(self, message: str) -> None:
        self._events.send("note", message=message)

    def _train_on_rollout(self, number: int) -> None:
        started = time.perf_counter()
        batch = self._sampler.sample(number) if self._sampler is not None else None
        sequences = share_sequences(batch.sequences if batch is not None else None)
        training = time.perf_counter()
        steps: list[dict[str, Any]] = []
        for _ in range(self._config.train.epochs):
            size = self._config.train.minibatch_prompts
            for members in minibatches(sequences, size, self._order):
                steps.append(self._optimizer_step(sequences, members, first=not steps))
        updating = time.perf_counter()
        self._update_engine(number)
        finished = time.perf_counter()
        if batch is not None:
            times = {
                "time/train_s": updating - training,
                "time/weights_s": finished - updating,
                "time/total_s": finished - started,
            }
            self._report(number, batch, steps, times)

    def _optimizer_step(
        self, sequences: Sequences, members: np.ndarray, *, first: bool
    ) -> dict[str, Any]:
        result = self._policy.train_step(self._micro_batches(sequences, members))
        self._step += 1
        metrics = self._reduce(result.records, with_mismatch=first)
        self._vetoed += metrics.get("vetoed_tokens", 0)
        self._tokens += metrics.get("tokens", 0)
        metrics |= {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
        if self._log is not None:
            self._log.write("step", self._step, metrics)
        return metrics

    def _micro_batches(self, sequences: Sequences, members: np.ndarray) -> list[MicroBatch]:
        config = self._config
        plan = plan_micro_batches(
            sequences.input_lengths,
            members,
            data_parallel=config.parallel.data,
            max_tokens=config.train.micro_batch_tokens,
            count_multiple=config.parallel.micro_batch_multiple,
        )
        return [
            pack(
                sequences,
                mine,
                minibatch=members,
                loss=config.loss,
                pad_multiple=config.parallel.tensor if config.parallel.sequence_parallel else 1,
                device=self._policy.device,
                context=context_shard(),
            )
            for mine in plan[parallel_state.get_data_parallel_rank()]
        ]

    def _reduce(self, records: list[TokenRecord], *, with_mismatch: bool) -> dict[str, Any]:
        """Compute metrics on the last pipeline stage and give them to the others."""
        metrics: list[dict[str, Any]] = [{}]
        if is_last_stage():
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            tokens = gather_records(records, group)
            metrics[0] = loss_metrics(tokens)
            if with_mismatch:
                metrics[0] |= mismatch_metrics(tokens)
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(metrics, src=last, group=group)
        return metrics[0]

    def _update_engine(self, version: int) -> None:
        tensors = self._policy.hf_tensors()
        if self._sampler is not None:
            self._sampler.update_weights(tensors, version)
        for _ in tensors:  # other ranks only take part in the gathering
            pass

    def _evaluate(self, number: int) -> float:
        if self._sampler is None:
            return math.nan
        self._events.send("phase", name=f"evaluating {self._config.eval.prompts} held-out prompts")
        metrics = self._sampler.heldout_reward()
        assert self._log is not None
        self._log.write("eval", number, metrics)
        self._note(f"held-out reward {metrics['heldout_reward']:.3f} after {number} rollouts")
        return metrics["heldout_reward"]

    def _report(
        self,
        number: int,
        batch: RolloutBatch,
        steps: Sequence[dict[str, Any]],
        times: dict[str, float],
    ) -> None:
        tokens = sum(step.get("tokens", 0) for step in steps)
        vetoed = sum(step.get("vetoed_tokens", 0) for step in steps)
        kl = sum(step.get("ppo_kl", 0.0) * step.get("tokens", 0) for step in steps)
        metrics: dict[str, Any] = batch.metrics | times
        metrics |= {
            "optimizer_steps": len(steps),
            "clip_fraction": vetoed / max(tokens, 1),
            "ppo_kl": kl / max(tokens, 1),
            "tokens_per_s/train": tokens / times["time/train_s"],
            "tokens_per_s": batch.metrics["response_tokens"] / times["time/total_s"],
        }
        assert self._log is not None
        self._log.write("rollout", number, metrics)
        shown = {k: metrics[k] for k in ("reward", "ppo_kl", "clip_fraction", "tokens_per_s")}
        self._events.send(
            "progress", rollout=number, rollouts=self._config.train.rollouts, metrics=shown
        )

    def _export(self) -> None:
        tensors = self._policy.hf_tensors()
        if dist.get_rank() == 0:
            self._events.send("phase", name="writing the policy")
            write_checkpoint(self._folder / "policy", tensors, self._config.model.path)
        for _ in tensors:
            pass

    def _summarize(self, before: float, after: float) -> None:
        if dist.get_rank() != 0:
            return
        share = 100 * self._vetoed / max(self._tokens, 1)
        self._note(
            f"{self._step} optimizer steps, {self._vetoed} of {self._tokens} tokens vetoed "
            f"({share:.2f} %)"
        )
        self._note(f"run folder: {self._folder}")
        self._events.send("done", message=f"held-out reward: {before:.3f} -> {after:.3f}")


def share_sequences(sequences: Sequences | None) -> Sequences:
    """Give rank 0's rollout batch to every rank, array by array. Collective."""
    rank = dist.get_rank()
    header: list[Any] = [None]
    if rank == 0:
        assert sequences is not None
        arrays = {f.name: getattr(sequences, f.name) for f in dataclasses.fields(Sequences)}
        header = [{name: (str(a.dtype), a.shape) for name, a in arrays.items()}]
    dist.broadcast_object_list(header, src=0)
    received = {}
    for name, (dtype, shape) in header[0].items():
        array = np.ascontiguousarray(arrays[name]) if rank == 0 else np.empty(shape, dtype)
        dist.broadcast(torch.from_numpy(array), src=0)
        received[name] = array
    return Sequences(**received)


def _policy_head(config: Config, vocab_size: int) -> PolicyHead:
    if config.policy.head == "fused":
        return FusedHead(config.loss, vocab_size, config.rollout.temperature)
    logits_dtype = DTYPES[config.policy.logits_dtype]
    return ReferenceHead(config.loss, vocab_size, config.rollout.temperature, logits_dtype)


def _optimizer_settings(config: Config) -> OptimizerSettings:
    train = config.train
    steps = train.epochs * -(-config.rollout.prompts // train.minibatch_prompts)
    return OptimizerSettings(
        learning_rate=train.learning_rate,
        min_learning_rate=train.min_learning_rate,
        warmup_steps=train.warmup_steps,
        total_steps=train.rollouts * steps,
        schedule=train.schedule,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
        ddp=config.megatron.ddp,
        optimizer=config.megatron.optimizer,
    )
