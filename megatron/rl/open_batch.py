# SPDX-License-Identifier: Apache-2.0
"""The rollout batch that is trained on, as one rank knows it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.rl.batch import Sequences
from megatron.rl.batch_draft import BatchReport
from megatron.rl.checkpoint.run_state import Plain
from megatron.rl.checkpoint.writer import WriteFile
from megatron.rl.config import Config
from megatron.rl.exchange import SequenceTable
from megatron.rl.mismatch import MismatchSplit
from megatron.rl.parallel import ParallelConfig
from megatron.rl.pending_batch import (
    PENDING_NAME,
    BatchProgress,
    mismatch_files,
    progress_file,
    read_mismatch,
    read_progress,
    read_share,
    record_file,
    split_tables,
)
from megatron.rl.policy.model import is_last_stage
from megatron.rl.rollout.records.record import Record
from megatron.rl.rollout_metrics import rollout_metrics

Metrics = dict[str, Any]


@dataclass
class OpenBatch:
    """A batch that was sampled and is not finished; times are of ``time.perf_counter``.

    Attributes:
        tables: what each engine's owner holds of what is trained on.
        record: what this rank's engine sampled, or has taken over; None on ranks without one.
        order: state of the generator that orders minibatches, before the first epoch.
        sequences: what this rank trains on, in the epoch that was planned last.
        steps: metrics of the optimizer steps so far.
    """

    number: int
    reports: Sequence[BatchReport]
    tables: list[SequenceTable]
    record: Record | None
    order: dict[str, Plain]
    started: float
    collected: float
    exchange_s: float = 0.0
    sequences: Sequences | None = None
    split: MismatchSplit | None = None
    steps: list[Metrics] = field(default_factory=list)

    def files(self, layout: ParallelConfig) -> dict[str, WriteFile]:
        """Return this rank's files of the batch, for a checkpoint; see pending_batch.py."""
        files: dict[str, WriteFile] = {}
        if dist.get_rank() == 0:
            progress = BatchProgress(
                self.number,
                tuple(self.reports),
                tuple(self.steps),
                elapsed_s=time.perf_counter() - self.started,
                collected_s=self.collected - self.started,
                exchange_s=self.exchange_s,
            )
            files |= progress_file(progress)
        if self.record is not None:
            files |= record_file(self.record)
        # All ranks of the last stage know the same.
        if dist.get_rank() == layout.stage_ranks(layout.pipeline - 1)[0]:
            assert self.split is not None, "no epoch is planned"
            files |= mismatch_files(self.split.state())
        return files

    def metrics(self, measured: Metrics, config: Config) -> Metrics:
        """Return the metrics of the whole batch, with those that were measured otherwise."""
        tokens = sum(step.get("tokens", 0) for step in self.steps)
        vetoed = sum(step.get("vetoed_tokens", 0) for step in self.steps)
        kl = sum(step.get("ppo_kl", 0.0) * step.get("tokens", 0) for step in self.steps)
        metrics: Metrics = rollout_metrics(self.reports, config) | measured
        return metrics | {
            "optimizer_steps": len(self.steps),
            "clip_fraction": vetoed / max(tokens, 1),
            "ppo_kl": kl / max(tokens, 1),
            "tokens_per_s/train": tokens / measured["time/train_s"],
            "tokens_per_s": metrics["response_tokens"] / measured["time/total_s"],
        }


def take_over(
    folder: Path,
    config: Config,
    *,
    engine: int | None,
    engines: int,
    order: dict[str, Plain],
    device: torch.device,
) -> OpenBatch:
    """Return the batch whose files a run before this one has saved in a folder.

    Args:
        engine: number of this rank's engine, of ``engines``.
        order: of minibatches, before the batch's first epoch.
    """
    progress = read_progress(folder / PENDING_NAME)
    tables = split_tables(progress.reports, config.rollout.group_size, engines)
    record: Record | None = None
    if engine is not None:
        first = sum(len(table) for table in tables[:engine])
        record = read_share(folder, progress.number, first, first + len(tables[engine]))
    split = MismatchSplit(progress.number - 1)
    if is_last_stage():
        split = MismatchSplit.from_state(read_mismatch(folder, device))
    started = time.perf_counter() - progress.elapsed_s
    return OpenBatch(
        progress.number,
        progress.reports,
        tables,
        record,
        order,
        started,
        started + progress.collected_s,
        progress.exchange_s,
        split=split,
        steps=[dict(step) for step in progress.steps],
    )
