# SPDX-License-Identifier: Apache-2.0
"""A rollout batch that some optimizer steps have been taken on, as files of a checkpoint.

    train-000004-engine0.parquet …   what each engine contributed, as in the run's records
    pending.json                     reports of the engines, metrics of the steps taken, times
    mismatch.json                    what MismatchSplit has learnt, and
    mismatch.safetensors             the tokens that it compares with (train.mismatch: every_token)

Another layout may take the batch over: sequences are numbered over the whole batch.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from megatron.rl.batch_draft import BatchReport, PartTotal, RoundReport
from megatron.rl.checkpoint.writer import WriteFile
from megatron.rl.exchange import SequenceTable
from megatron.rl.mismatch import MismatchState
from megatron.rl.policy.head import TokenRecord
from megatron.rl.rollout.records.record import Record
from megatron.rl.rollout.records.record_file import write_record
from megatron.rl.rollout.records.record_folder import RecordFolder, record_name

PENDING_NAME = "pending.json"
MISMATCH_NAME = "mismatch.json"
MISMATCH_TOKENS_NAME = "mismatch.safetensors"

_TABLE_DTYPES: dict[str, Any] = {
    "group": np.int64,
    "prompt_lengths": np.int64,
    "response_lengths": np.int64,
    "rewards": np.float64,
    "advantages": np.float32,
    "finished": np.bool_,
    "versions": np.int32,
    "in_loss": np.bool_,
}


@dataclass(frozen=True)
class BatchProgress:
    """What all ranks know of the batch, and how far it has come.

    Attributes:
        reports: of the engines that sampled it.
        steps: metrics of the optimizer steps that were taken.
        elapsed_s, collected_s, exchange_s: seconds since it began, until it was sampled, and of
            the exchange.
    """

    number: int
    reports: tuple[BatchReport, ...]
    steps: tuple[Mapping[str, Any], ...]
    elapsed_s: float
    collected_s: float
    exchange_s: float


def progress_file(progress: BatchProgress) -> dict[str, WriteFile]:
    """Return the file of what all ranks know, for one of them to write."""
    fields = {f.name: getattr(progress, f.name) for f in dataclasses.fields(progress)}
    fields["reports"] = [_report_fields(report) for report in progress.reports]
    return {PENDING_NAME: partial(_write_text, json.dumps(fields))}


def read_progress(path: Path) -> BatchProgress:
    """Undo :func:`progress_file`."""
    fields = json.loads(path.read_text())
    fields["reports"] = tuple(_report(report) for report in fields["reports"])
    return BatchProgress(**fields | {"steps": tuple(fields["steps"])})


def record_file(record: Record) -> dict[str, WriteFile]:
    """Return the file of one engine's share, for its owner to write; none without sequences."""
    if not len(record):
        return {}
    return {record_name(record.info): lambda path: write_record(path, record)}


def read_share(folder: Path, number: int, first: int, stop: int) -> Record:
    """Read the sequences ``[first, stop)`` of the batch, whichever engines sampled them."""
    return RecordFolder(folder).sequences("train", number, first, stop)


def mismatch_files(state: MismatchState) -> dict[str, WriteFile]:
    """Return the files of what the last pipeline stage has learnt, for one rank to write."""
    fields = {
        "version": state.version,
        "steps_measured": state.steps_measured,
        "engine": state.engine,
    }
    files: dict[str, WriteFile] = {MISMATCH_NAME: partial(_write_text, json.dumps(fields))}
    if state.sampled_by is not None:
        columns = {
            name: column.cpu().contiguous()
            for name, column in vars(state.sampled_by).items()
            if column is not None
        }
        files[MISMATCH_TOKENS_NAME] = partial(save_file, columns)
    return files


def read_mismatch(folder: Path, device: torch.device) -> MismatchState:
    """Undo :func:`mismatch_files`."""
    fields = json.loads((folder / MISMATCH_NAME).read_text())
    tokens: TokenRecord | None = None
    if (folder / MISMATCH_TOKENS_NAME).exists():
        columns = load_file(folder / MISMATCH_TOKENS_NAME, device=str(device))
        names = [f.name for f in dataclasses.fields(TokenRecord)]
        tokens = TokenRecord(**{name: columns.get(name) for name in names})  # type: ignore[arg-type]
    return MismatchState(**fields, sampled_by=tokens)


def split_tables(reports: Sequence[BatchReport], samples: int, engines: int) -> list[SequenceTable]:
    """Spread the sequences over so many engines' owners, whole groups, nearly the same to each.

    Where there are as many engines as sampled the batch, each keeps its own.
    """
    if len(reports) == engines:
        return [report.table for report in reports]
    table = SequenceTable.join([report.table for report in reports])
    groups = len(table) // samples
    edges = [groups * engine // engines * samples for engine in range(engines + 1)]
    return [
        SequenceTable(*(column[first:stop] for column in vars(table).values()))
        for first, stop in itertools.pairwise(edges)
    ]


def _write_text(text: str, path: Path) -> None:
    path.write_text(text)


def _report_fields(report: BatchReport) -> dict[str, Any]:
    rounds = [
        {f.name: getattr(this, f.name) for f in dataclasses.fields(this)}
        | {
            "sampled": _table_fields(this.sampled),
            "reward_parts": {name: vars(part) for name, part in this.reward_parts.items()},
        }
        for this in report.rounds
    ]
    return {"table": _table_fields(report.table), "rounds": rounds}


def _report(fields: Mapping[str, Any]) -> BatchReport:
    rounds = [
        RoundReport(
            **this
            | {
                "sampled": _table(this["sampled"]),
                "reward_parts": {
                    name: PartTotal(**part) for name, part in this["reward_parts"].items()
                },
            }
        )
        for this in fields["rounds"]
    ]
    return BatchReport(_table(fields["table"]), tuple(rounds))


def _table_fields(table: SequenceTable) -> dict[str, list[Any]]:
    # Python's numbers hold every value of these types, and JSON gives floats back as they were.
    return {name: column.tolist() for name, column in vars(table).items()}


def _table(fields: Mapping[str, list[Any]]) -> SequenceTable:
    columns: dict[str, NDArray[Any]] = {
        name: np.array(values, dtype=_TABLE_DTYPES[name]) for name, values in fields.items()
    }
    return SequenceTable(**columns)
