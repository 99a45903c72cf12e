# SPDX-License-Identifier: Apache-2.0
"""Saved responses: whole after a cut anywhere, one writer, nothing foreign taken for them."""

from pathlib import Path

import pytest

from megatron.rl.errors import UserError
from megatron.rl.evaluation.responses import Response, ResponseFile, read_responses

SAMPLES = 3


def problem(number: int, bench: str = "b") -> tuple[Response, ...]:
    return tuple(
        Response(
            bench, number, i, 5, i < 2, i / 2, None if i else "½", "½", 0, f"line\n{i} ü\ud800"
        )
        for i in range(SAMPLES)
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "responses.jsonl"
    with ResponseFile(path, SAMPLES) as file:
        for bench, number in (("b", 4), ("a", 0), ("b", 0)):
            file.append(problem(number, bench))
    return path


def test_read_back(saved: Path) -> None:
    expected = [*problem(4), *problem(0, "a"), *problem(0)]
    assert list(read_responses(saved)) == expected
    with ResponseFile(saved, SAMPLES) as file:
        assert file.done == {("b", 4): problem(4), ("a", 0): problem(0, "a"), ("b", 0): problem(0)}


def test_cut_anywhere_leaves_whole_problems(saved: Path) -> None:
    """Killed anywhere, then started again and given what is missing: the same file."""
    whole = saved.read_bytes()
    lines = whole.splitlines(keepends=True)
    ends = [sum(map(len, lines[: SAMPLES * count])) for count in range(4)]
    order = [problem(4), problem(0, "a"), problem(0)]
    line_ends = [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]
    near_ends = {end + step for end in line_ends for step in (-2, -1, 0, 1)}
    for size in sorted(near_ends.union(range(0, len(whole), 97)) & set(range(len(whole) + 1))):
        saved.write_bytes(whole[:size])
        with ResponseFile(saved, SAMPLES) as file:
            kept = sum(end <= size for end in ends) - 1
            assert len(file.done) == kept, size
            assert saved.stat().st_size == ends[kept]
            for missing in order[kept:]:
                file.append(missing)
        assert saved.read_bytes() == whole, size


def test_second_writer_is_refused(saved: Path) -> None:
    with (
        ResponseFile(saved, SAMPLES),
        pytest.raises(UserError, match="being written by another evaluation"),
    ):
        ResponseFile(saved, SAMPLES)
    ResponseFile(saved, SAMPLES).close()


def test_other_number_of_samples_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="expected 2 samples of one problem from byte"):
        ResponseFile(saved, 2)
    assert len(list(read_responses(saved))) == 9, "and nothing is cut off"


@pytest.mark.parametrize("line", [b"no json\n", b'{"bench": "b"}\n', b"[]\n"])
def test_foreign_lines_are_refused(saved: Path, line: bytes) -> None:
    lines = saved.read_bytes().splitlines(keepends=True)
    saved.write_bytes(b"".join([*lines[:4], line, *lines[5:]]))
    with pytest.raises(UserError, match="no response from byte"):
        ResponseFile(saved, SAMPLES)
