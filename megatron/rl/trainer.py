# SPDX-License-Identifier: Apache-2.0
"""The training loop: sample, score, take several optimizer steps, hand the weights back.

Every rank runs it. Rollouts, weight updates and metrics are ``rollout_session.py``'s.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.rl.config import Config
from megatron.rl.evaluation.in_training import average_of, bench_names
from megatron.rl.events import EventSink
from megatron.rl.model.architecture import Architecture, read_architecture
from megatron.rl.model.build import BuildOptions
from megatron.rl.model.fp8 import fp8_settings
from megatron.rl.model.fp8_blocks import differing_blocks
from megatron.rl.policy.from_config import (
    DTYPES,
    optimizer_settings,
    policy_head,
    steps_per_batch,
)
from megatron.rl.policy.model import Policy
from megatron.rl.rollout_session import RolloutSession
from megatron.rl.weights.hf_files import write_checkpoint


class Trainer:
    """One run on this rank, from the starting policy to the exported one."""

    def __init__(self, config: Config, folder: Path, events: EventSink) -> None:
        self._config = config
        self._folder = folder
        self._events = events
        self._draws = dist.get_rank() == 0
        self._session = RolloutSession(config, self._note)
        self._step = 0
        self._vetoed = 0
        self._tokens = 0

    def run(self) -> None:
        """Train to the end. Everything that was started is ended, whatever happens."""
        with contextlib.closing(self._session):
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
        engines = "engine" if self._session.num_engines == 1 else "engines"
        self._phase(f"starting the rollout {engines} and the trainer")
        self._folder = self._session.start(self._folder)
        architecture = read_architecture(config.model.path)
        self._policy = Policy(
            architecture,
            config.parallel,
            BuildOptions(
                DTYPES[config.model.dtype], config.megatron.transformer, fp8_settings(config)
            ),
            optimizer_settings(config),
            policy_head(config, architecture.vocab_size),
            config.model.path,
        )
        self._session.connect(self._policy)
        self._note_differing_blocks(architecture)

    def _note_differing_blocks(self, architecture: Architecture) -> None:
        both = self._config.model.fp8 == "blockwise" and self._config.bridge.quantization != "none"
        differing = differing_blocks(architecture, self._config.parallel) if both else ()
        if differing and self._draws:
            names = ", ".join(sorted({name.split(".")[-2] for name in differing}))
            self._note(
                f"FP8: {names} are not whole 128 x 128 blocks on a rank; trainer and engine round "
                "them in different blocks"
            )

    def _note(self, message: str) -> None:
        self._events.send("note", message=message)

    def _phase(self, name: str) -> None:
        if self._draws:
            self._events.send("phase", name=name)

    def _train_on_rollout(self, number: int) -> None:
        self._session.collect(number)
        before = self._step
        for _ in range(self._config.train.epochs):
            for step in self._session.plan_epoch().steps:
                result = self._policy.train_step(self._session.micro_batches(step))
                self._step += 1
                metrics = self._session.finish_step(
                    self._step,
                    result.records,
                    result.losses,
                    {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate},
                )
                self._vetoed += metrics.get("vetoed_tokens", 0)
                self._tokens += metrics.get("tokens", 0)
        # Dynamic sampling may leave a smaller batch: the schedule goes by batches, not by steps.
        self._policy.pass_over_steps(steps_per_batch(self._config) - (self._step - before))
        if self._step == before and self._draws:
            self._note(f"no group of rollout batch {number} teaches anything: no step was taken")
        self._show(number, self._session.finish_batch())

    def _show(self, number: int, metrics: dict[str, Any]) -> None:
        if self._draws:
            shown = {k: metrics[k] for k in ("reward", "ppo_kl", "clip_fraction", "tokens_per_s")}
            self._events.send(
                "progress", rollout=number, rollouts=self._config.train.rollouts, metrics=shown
            )

    def _evaluate(self, number: int) -> float:
        section = self._config.eval
        names = bench_names(section.benches)
        beside = "".join(f", {name}" for name in names)
        self._phase(f"evaluating {section.prompts} held-out prompts{beside}")
        metrics = self._session.evaluate(number)
        reward: float = metrics["heldout_reward"]
        if self._draws:
            self._note(f"held-out reward {reward:.3f} after {number} rollouts")
            for name in names:
                self._note(f"{name} {average_of(metrics, name, section.samples)}")
        return reward

    def _export(self) -> None:
        tensors = self._policy.hf_tensors()
        self._phase("writing the policy")
        if self._draws:
            write_checkpoint(self._folder / "policy", tensors, self._config.model.path)
        for _ in tensors:
            pass

    def _summarize(self, before: float, after: float) -> None:
        if not self._draws:
            return
        share = 100 * self._vetoed / max(self._tokens, 1)
        self._note(
            f"{self._step} optimizer steps, {self._vetoed} of {self._tokens} tokens vetoed "
            f"({share:.2f} %)"
        )
        self._note(f"run folder: {self._folder}")
        self._events.send("done", message=f"held-out reward: {before:.3f} -> {after:.3f}")
