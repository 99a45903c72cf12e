# SPDX-License-Identifier: Apache-2.0
"""An evaluation's folder: what was asked, every response, and what they come to.

``settings.json``   what decides the responses and their scores; one that continues has the same
``responses.jsonl`` a line a response, see responses.py
``problems.jsonl``  a line a problem: how often it was solved, answered, cut
``results.json``    settings, versions, metrics with intervals
``engine.log``      what vLLM prints
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.rl.errors import UserError
from megatron.rl.evaluation.estimators import Interval
from megatron.rl.evaluation.measure import BenchMetrics, ProblemSamples
from megatron.rl.evaluation.responses import Response
from megatron.rl.plain_files import read_json_object

SETTINGS_FILE = "settings.json"
RESPONSES_FILE = "responses.jsonl"
PROBLEMS_FILE = "problems.jsonl"
RESULTS_FILE = "results.json"
ENGINE_LOG = "engine.log"


def open_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder of an evaluation, or find that it holds one with the same settings.

    Raises:
        UserError: it holds something else, or an evaluation with other settings.
    """
    file = folder / SETTINGS_FILE
    if not file.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out: {folder} holds something else than an evaluation")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
        return
    found = read_json_object(file)
    wanted = json.loads(json.dumps(settings))
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"--out: the evaluation in {folder} has {name} {_short(found.get(name))}, this one "
                f"{_short(wanted.get(name))}: its responses cannot be continued with; set it back, "
                "or name another folder"
            )


def samples_of(responses: Sequence[Response]) -> ProblemSamples:
    """Return what the metrics need of all samples of a problem."""
    return ProblemSamples(
        problem=responses[0].problem,
        scores=np.array([one.score for one in responses], dtype=np.float64),
        answers=tuple(one.answer for one in responses),
        lengths=np.array([one.tokens for one in responses], dtype=np.int64),
        finished=np.array([one.finished for one in responses], dtype=np.bool_),
        unscored=responses[0].unscored,
    )


def problem_row(responses: Sequence[Response], question: str, has_answers: bool) -> dict[str, Any]:
    """Return a problem's line of the table of problems."""
    samples = samples_of(responses)
    row = {
        "bench": responses[0].bench,
        "problem": responses[0].problem,
        "samples": len(samples),
        "correct": samples.correct,
        "mean_score": float(samples.scores.mean()),
        "gold": responses[0].gold,
        "truncated": int((~samples.finished).sum()),
        "mean_tokens": float(samples.lengths.mean()),
        "question": question,
    }
    if has_answers:
        votes = [answer for answer in samples.answers if answer is not None]
        row["commonest_answer"] = max(sorted(set(votes)), key=votes.count, default=None)
        row["without_answer"] = samples.answers.count(None)
    return row


def metrics_json(metrics: BenchMetrics) -> dict[str, Any]:
    """Return a benchmark's metrics as plain values."""
    return {
        "problems": metrics.problems,
        "samples": metrics.samples,
        "responses": metrics.responses,
        "correct_responses": metrics.correct,
        "unscored_responses": metrics.unscored,
        "metrics": {
            name: {"value": estimate.value, "interval_95": _bounds(estimate.interval)}
            for name, estimate in metrics.estimates.items()
        },
        "sampling_stderr": metrics.sampling_stderr,
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is whole or not there."""
    _write(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSON line a row; the file is whole or not there."""
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _bounds(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
