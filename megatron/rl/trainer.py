# SPDX-License-Identifier: Apache-2.0
"""The training loop: sample, score, take several optimizer steps, hand the weights back.

Every rank runs it. Rollouts, weight updates and metrics are ``rollout_session.py``'s. A run that
was saved goes on as if it had never ended; see docs/checkpoints.md.
"""

import contextlib
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megatron.rl.checkpoint.agreement import RankFailed, any_rank
from megatron.rl.checkpoint.reader import FoundCheckpoint, find_newest
from megatron.rl.checkpoint.save_report import SaveReport
from megatron.rl.checkpoint.writer import CheckpointWriter
from megatron.rl.config import Config
from megatron.rl.epoch_plan import PlannedStep
from megatron.rl.errors import UserError
from megatron.rl.evaluation.in_training import average_of, bench_names
from megatron.rl.events import EventSink
from megatron.rl.metrics_log import METRICS_NAME
from megatron.rl.model.architecture import Architecture, read_architecture
from megatron.rl.model.build import BuildOptions
from megatron.rl.model.fp8 import fp8_settings
from megatron.rl.model.fp8_blocks import differing_blocks
from megatron.rl.pending_batch import PENDING_NAME
from megatron.rl.policy.from_config import (
    DTYPES,
    optimizer_settings,
    policy_head,
    steps_per_batch,
)
from megatron.rl.policy.model import Policy
from megatron.rl.rollout_session import RolloutSession
from megatron.rl.run_folder import CONFIG_NAME, how_to_continue, write_result
from megatron.rl.run_progress import RunProgress, log_position
from megatron.rl.run_settings import settings_digest
from megatron.rl.stop_request import Preempted, StopRequest
from megatron.rl.weights.hf_files import write_checkpoint

Ending = Literal["finished", "saved", "unsaved"]


class Trainer:
    """One run on this rank, from the starting policy, or a checkpoint, to the exported one.

    Args:
        folder: of the run; a run that is there is continued.
        stop: asks for an early end.
        allow_changed: continue from a checkpoint of other settings.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        events: EventSink,
        stop: StopRequest,
        *,
        allow_changed: bool = False,
    ) -> None:
        self._config = config
        self._folder = folder
        self._events = events
        self._stop = stop
        self._allow_changed = allow_changed
        self._draws = dist.get_rank() == 0
        self._session = RolloutSession(config, self._note, stop)
        self._progress = RunProgress()
        self._writer: CheckpointWriter | None = None
        self._saved_at = (0, -1)
        self._last_save: SaveReport | None = None

    def run(self) -> Ending:
        """Train to the end, or until the run is asked to stop.

        Everything that was started is ended, whatever happens.

        Returns:
            ``finished``; ``saved``: stopped, and resumed from here; ``unsaved``: stopped, and no
            checkpoint says where.
        """
        with contextlib.closing(self._session):
            self._set_up_or_stop()
            try:
                self._train()
            except Preempted:
                return self._save_and_stop()
            except FloatingPointError:
                self._collect_save(wait=True)  # of an earlier step; all ranks are here
                raise
            if self._config.run.export:
                self._export()
            self._summarize()
        return "finished"

    def _set_up_or_stop(self) -> None:
        try:
            with self._stop.interrupting():
                self._set_up()
            if any_rank(self._stop.requested):  # a rank may have left when the last one arrived
                raise Preempted
        except Exception as error:
            if self._stop.requested:
                raise Preempted from error  # it misses ranks that have stopped already
            raise

    def _set_up(self) -> None:
        config = self._config
        found = self._find_checkpoint()
        if found is not None:
            self._progress = RunProgress.from_run_state(found.run)
        engines = "engine" if self._session.num_engines == 1 else "engines"
        self._phase(f"starting the rollout {engines} and the trainer")
        position = None if found is None else log_position(found.run)
        self._folder = self._session.start(self._folder, position)
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
        if config.checkpoint.every:
            self._writer = CheckpointWriter(config.checkpoint, self._folder, self._policy)
            self._writer.start()
        self._load(found)
        self._note_differing_blocks(architecture)

    def _find_checkpoint(self) -> FoundCheckpoint | None:
        """Return where the run continues, if it has come to a checkpoint; say which one."""
        found = find_newest(self._folder)
        if found is None:
            if self._draws and (self._folder / METRICS_NAME).exists():
                self._note("no checkpoint yet: training from the start")
            return None
        if found.run.config_digest != settings_digest(self._config) and not self._allow_changed:
            raise UserError(
                f"{found.path} is of a run with other settings than {self._folder / CONFIG_NAME}: "
                "restore them, or continue with --allow-changed"
            )
        if self._draws:
            self._note(f"{found.explain()}, after {found.run.rollout} rollouts")
        return found

    def _load(self, found: FoundCheckpoint | None) -> None:
        """Load what was found, and give it to the engines."""
        progress = self._progress
        if found is None:
            self._session.resume(None, evaluated=-1, pending=False)
            self._session.connect(self._policy)
            return
        pending = found.extra_file(PENDING_NAME) is not None
        found.load_into(self._policy)
        self._session.resume(found.run, evaluated=progress.evaluated, pending=pending)
        self._session.connect(self._policy, version=found.run.policy_version)
        if pending:
            self._session.resume_batch(found, progress.epoch)
        self._saved_at = (progress.rollout, progress.evaluated)

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

    def _train(self) -> None:
        """Everything between the start and the export, from wherever the run stands."""
        progress, train = self._progress, self._config.train
        while True:
            if not self._session.batch_open:
                if self._evaluation_due():
                    self._evaluate()
                self._save_if_due()
            if progress.rollout >= train.rollouts:
                return
            self._train_on_rollout(progress.rollout + 1)

    def _evaluation_due(self) -> bool:
        progress, every = self._progress, self._config.eval.every
        if progress.evaluated == progress.rollout:
            return False
        last = progress.rollout >= self._config.train.rollouts and progress.step > 0
        return progress.rollout == 0 or last or bool(every and progress.rollout % every == 0)

    def _train_on_rollout(self, number: int) -> None:
        progress, session = self._progress, self._session
        if not session.batch_open:
            session.collect(number)
        while progress.epoch < self._config.train.epochs:
            for step in session.plan_epoch().steps[progress.epoch_step :]:
                if any_rank(self._stop.requested):
                    raise Preempted
                self._take_step(step)
            progress.epoch, progress.epoch_step = progress.epoch + 1, 0
        taken = session.steps_on_batch
        # Dynamic sampling may leave a smaller batch: the schedule goes by batches, not by steps.
        self._policy.pass_over_steps(steps_per_batch(self._config) - taken)
        if not taken and self._draws:
            self._note(f"no group of rollout batch {number} teaches anything: no step was taken")
        self._show(number, session.finish_batch())
        progress.rollout, progress.epoch = number, 0

    def _take_step(self, step: PlannedStep) -> None:
        progress = self._progress
        result = self._policy.train_step(self._session.micro_batches(step))
        progress.step += 1
        progress.epoch_step += 1
        metrics = self._session.finish_step(
            progress.step,
            result.records,
            result.losses,
            {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate},
        )
        progress.vetoed += metrics.get("vetoed_tokens", 0)
        progress.tokens += metrics.get("tokens", 0)
        self._collect_save()

    def _save_if_due(self) -> None:
        """Save between two batches, and at the end."""
        progress, every = self._progress, self._config.checkpoint.every
        at = (progress.rollout, progress.evaluated)
        last = progress.rollout >= self._config.train.rollouts
        if progress.step and every and at != self._saved_at:
            if last or progress.rollout % every == 0:
                self._saved_at = at
                self._session.rest_engine()
                self._save(pending=False)
            if last:
                self._collect_save(wait=True)

    def _save(self, *, pending: bool) -> None:
        assert self._writer is not None
        progress = self._progress
        try:
            state = self._session.state()
        except RankFailed as error:
            self._note_save(SaveReport(progress.step, None, str(error), 0, 0.0, 0.0))
            return
        run = progress.to_run_state(state, settings_digest(self._config), pending=pending)
        score = progress.score if progress.evaluated == progress.rollout and not pending else None
        extra = self._session.pending_files() if pending else None
        self._note_save(self._writer.save(run, score=score, extra=extra))

    def _collect_save(self, *, wait: bool = False) -> None:
        """Publish a checkpoint that has been written; ``wait`` for it if it has not."""
        if self._writer is not None:
            self._note_save(self._writer.finish() if wait else self._writer.collect())

    def _note_save(self, report: SaveReport | None) -> None:
        if report is None:
            return
        self._last_save = report
        if not self._draws:
            return
        metrics = {
            name.removeprefix("checkpoint/"): value for name, value in report.metrics().items()
        }
        self._session.log("checkpoint", report.step, metrics)
        if (message := report.message()) is not None:
            self._note(message)

    def _save_and_stop(self) -> Ending:
        """Save where the run stands; a batch that was being sampled is sampled again."""
        progress = self._progress
        where = f"after {progress.step} optimizer steps, in rollout batch {progress.rollout + 1}"
        if self._writer is None:
            if self._draws:
                self._note(f"stopped {where}; nothing was saved (checkpoint.every is 0)")
            return "unsaved"
        self._phase("stopping: saving a checkpoint")
        self._collect_save(wait=True)
        self._session.end_sampling()
        self._save(pending=self._session.batch_open)
        self._collect_save(wait=True)
        if self._last_save is not None and self._last_save.error is not None:
            raise UserError(
                f"asked to stop {where}, but no checkpoint could be written: "
                f"{self._last_save.error}; {how_to_continue(self._folder)}"
            )
        if self._draws:
            self._note(f"stopped {where}; {how_to_continue(self._folder)}")
        return "saved"

    def _show(self, number: int, metrics: dict[str, Any]) -> None:
        if self._draws:
            shown = {k: metrics[k] for k in ("reward", "ppo_kl", "clip_fraction", "tokens_per_s")}
            self._events.send(
                "progress", rollout=number, rollouts=self._config.train.rollouts, metrics=shown
            )

    def _evaluate(self) -> None:
        section, number = self._config.eval, self._progress.rollout
        names = bench_names(section.benches)
        beside = "".join(f", {name}" for name in names)
        self._phase(f"evaluating {section.prompts} held-out prompts{beside}")
        metrics = self._session.evaluate(number)
        reward: float = metrics["heldout_reward"]
        self._progress.note_evaluation(reward)
        if self._draws:
            self._note(f"held-out reward {reward:.3f} after {number} rollouts")
            for name in names:
                self._note(f"{name} {average_of(metrics, name, section.samples)}")

    def _export(self) -> None:
        tensors = self._policy.hf_tensors()
        self._phase("writing the policy")
        if self._draws:
            write_checkpoint(self._folder / "policy", tensors, self._config.model.path)
        for _ in tensors:
            pass

    def _summarize(self) -> None:
        if not self._draws:
            return
        progress = self._progress
        share = 100 * progress.vetoed / max(progress.tokens, 1)
        self._note(
            f"{progress.step} optimizer steps, {progress.vetoed} of {progress.tokens} tokens "
            f"vetoed ({share:.2f} %)"
        )
        self._note(f"run folder: {self._folder}")
        message = f"held-out reward: {progress.first_score:.3f} -> {progress.score:.3f}"
        write_result(self._folder, progress.rollout, message)
        self._events.send("done", message=message)
