# SPDX-License-Identifier: Apache-2.0
"""A batch in the middle of which a run was stopped: every value comes back as it was."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.batch_draft import BatchReport, PartTotal, RoundReport
from megatron.rl.exchange import SequenceTable
from megatron.rl.mismatch import MismatchSplit, MismatchState
from megatron.rl.pending_batch import (
    BatchProgress,
    mismatch_files,
    progress_file,
    read_mismatch,
    read_progress,
    split_tables,
)
from tests.unit.token_records import record

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
CPU = torch.device("cpu")


def table(groups: int, samples: int, values: list[float]) -> SequenceTable:
    count = groups * samples
    floats = np.resize(np.array(values), count)
    return SequenceTable(
        group=np.repeat(np.arange(groups), samples) + (1 << 40),
        prompt_lengths=np.arange(count) + 3,
        response_lengths=np.arange(count) * 7 + 1,
        rewards=floats,
        advantages=np.clip(floats, -1e30, 1e30).astype(np.float32),
        finished=np.arange(count) % 2 == 0,
        versions=np.full(count, 4, dtype=np.int32),
        in_loss=np.arange(count) % 3 > 0,
    )


def report(groups: int, values: list[float]) -> BatchReport:
    this = RoundReport(
        sampled=table(groups, 2, values),
        groups_that_teach=1,
        reward_parts={"score": PartTotal(values[0], 3)},
        reward_failures=1,
        reward_timeouts=0,
        dropped=2,
        rollout_s=0.1,
        reward_s=0.7,
    )
    return BatchReport(table(groups, 2, values), (this, this))


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    else:
        assert a == b


@given(values=st.lists(FLOATS, min_size=1, max_size=5), engines=st.integers(1, 3))
def test_progress_comes_back_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], engines: int
) -> None:
    path = tmp_path_factory.mktemp("pending") / "pending.json"
    reports = tuple(report(engine, values) for engine in range(engines))
    steps = ({"loss": values[0], "tokens": 7}, {"loss": 0.1})
    progress = BatchProgress(5, reports, steps, 3.25, 2.5, values[-1])
    (write,) = progress_file(progress).values()
    write(path)
    assert_equal(read_progress(path), progress)


def test_a_metric_that_is_not_finite_comes_back(tmp_path: Path) -> None:
    progress = BatchProgress(1, (report(1, [1.0]),), ({"kl": float("inf")},), 0.0, 0.0, 0.0)
    (write,) = progress_file(progress).values()
    write(tmp_path / "p")
    assert read_progress(tmp_path / "p").steps[0]["kl"] == float("inf")


@pytest.mark.parametrize("engines", [1, 2, 3, 5])
def test_other_engines_share_the_sequences_out(engines: int) -> None:
    reports = [report(3, [1.0, 2.0]), report(1, [3.0])]
    tables = split_tables(reports, samples=2, engines=engines)
    assert len(tables) == engines
    whole = SequenceTable.join([part.table for part in reports])
    assert_equal(SequenceTable.join(tables), whole)
    sizes = [len(part) for part in tables]
    assert all(size % 2 == 0 for size in sizes), "groups stay whole"
    assert sizes == [6, 2] if engines == 2 else max(sizes) - min(sizes) <= 2


def test_mismatch_goes_on_where_it_was(tmp_path: Path) -> None:
    """The next step's metrics are those of a split that was never saved."""
    tokens = record([3, 3, 1], [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.25])
    later = record([1, 3], [-0.5, -2.0], [-0.125, -3.0], position=[0, 1])
    for sampled_by in (None, tokens):
        split = MismatchSplit(0, sampled_by)
        split.measure(tokens)
        folder = tmp_path / str(sampled_by is None)
        folder.mkdir()
        for name, write in mismatch_files(split.state()).items():
            write(folder / name)
        resumed = MismatchSplit.from_state(read_mismatch(folder, CPU))
        assert resumed.steps_measured == split.steps_measured == 1
        assert resumed.measure(later) == split.measure(later)


def test_mismatch_before_its_first_step(tmp_path: Path) -> None:
    state = MismatchState(7, 0, None, None)
    for name, write in mismatch_files(state).items():
        write(tmp_path / name)
    assert read_mismatch(tmp_path, CPU) == state
