# SPDX-License-Identifier: Apache-2.0
"""`pdm-rl eval` and benchmarks during training, recounted from the responses that they save."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import Run, assert_all_gone, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BENCH = "tests.e2e.eval_task:ParityBench"
PROBLEMS, SAMPLES = 8, 4
TIMEOUT_S = 240.0


def evaluation(model: Path, out: Path, *further: str) -> subprocess.Popen[str]:
    """Start `pdm-rl eval`; one sequence at a time, so that there is time to interrupt it."""
    command = [sys.executable, "-m", "megatron.rl.cli", "eval", str(model), "--out", str(out)]
    settings = {
        "--bench": BENCH,
        "--problems": PROBLEMS,
        "--samples": SAMPLES,
        "--max-tokens": 40,
        "--max-num-seqs": 1,
        "--threads": 1,
        "--device": "cpu",
    }
    arguments = [str(part) for pair in settings.items() for part in pair]
    return subprocess.Popen(
        [*command, *arguments, *further],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, output


def table_of(output: str) -> str:
    return output[output.index("problems x samples") : output.index("results.json")].rsplit(
        "\n", 1
    )[0]


def saved(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("evals") / "whole"
    code, output = wait(evaluation(model, out))
    assert code == 0, output
    return out, output


def test_recount_from_the_saved_responses(evaluated: tuple[Path, str]) -> None:
    """Every number of the table again, from the texts, by other code."""
    groups: dict[int, list[str]] = defaultdict(list)
    rows = saved(evaluated[0])
    for row in rows:
        groups[row["problem"]].append(row["text"])
    assert sorted(groups) == list(range(PROBLEMS))

    def right(text: str) -> bool:
        return len(text) >= 4 and sum(ord(letter) for letter in text) % 2 == 0

    solved = [[right(text) for text in texts] for texts in groups.values()]
    correct = sum(map(sum, solved))
    assert 0 < correct < PROBLEMS * SAMPLES
    (bench,) = json.loads((evaluated[0] / "results.json").read_text())["benches"].values()
    value = {name: metric["value"] for name, metric in bench["metrics"].items()}
    assert bench["correct_responses"] == correct
    assert value["avg@4"] == pytest.approx(correct / (PROBLEMS * SAMPLES))
    pairs = [any(pair) for problem in solved for pair in itertools.combinations(problem, 2)]
    assert value["pass@2"] == pytest.approx(sum(pairs) / len(pairs))
    assert value["pass@4"] == pytest.approx(sum(map(any, solved)) / PROBLEMS)
    silent = [[len(text) < 4 for text in texts] for texts in groups.values()]
    votes = [(sum(s), sum(q)) for s, q in zip(solved, silent, strict=True)]
    won = [float(2 * r > SAMPLES - q) + 0.5 * (0 < 2 * r == SAMPLES - q) for r, q in votes]
    assert value["majority@4"] == pytest.approx(sum(won) / PROBLEMS)
    assert value["no_answer"] == pytest.approx(sum(map(sum, silent)) / (PROBLEMS * SAMPLES))
    assert value["truncated"] == pytest.approx(sum(not r["finished"] for r in rows) / len(rows))
    assert value["response_length"] == pytest.approx(sum(r["tokens"] for r in rows) / len(rows))
    low, high = bench["metrics"]["avg@4"]["interval_95"]
    assert low < value["avg@4"] < high


def test_output_is_quiet(evaluated: tuple[Path, str]) -> None:
    lines = evaluated[1].strip().splitlines()
    assert lines[-1].endswith("results.json, problems.jsonl, responses.jsonl")
    noise = ("Warning", "WARNING", "Traceback", "site-packages", "DEPRECATED")
    assert not [line for line in lines if any(word in line for word in noise)]


def test_finished_evaluation_is_only_shown_again(evaluated: tuple[Path, str], model: Path) -> None:
    out, output = evaluated
    before = (out / "responses.jsonl").read_bytes()
    code, again = wait(evaluation(model, out))
    assert code == 0, again
    assert "rollout engine" not in again
    assert table_of(again) == table_of(output)
    assert (out / "responses.jsonl").read_bytes() == before


def test_other_settings_are_not_mixed(evaluated: tuple[Path, str], model: Path) -> None:
    code, output = wait(evaluation(model, evaluated[0], "--temperature", "0.5"))
    assert code == 2
    assert "sampling" in output and output.count("\n") == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_anywhere_it_ends_with_the_same_table(
    evaluated: tuple[Path, str], model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "stopped"
    process = evaluation(model, out)
    deadline = time.monotonic() + TIMEOUT_S
    file = out / "responses.jsonl"
    while not file.is_file() or file.read_bytes().count(b"\n") < 2 * SAMPLES:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    code, output = wait(process)
    assert code == (130 if how == signal.SIGINT else -signal.SIGKILL)
    if how == signal.SIGINT:
        assert f"--out {out} continues" in output and "Traceback" not in output
    assert_all_gone(started)
    lines = file.read_bytes().count(b"\n")
    assert 2 * SAMPLES <= lines < PROBLEMS * SAMPLES, "it was meant to be stopped midway"

    code, output = wait(evaluation(model, out))
    assert code == 0, output
    assert f"{PROBLEMS - lines // SAMPLES} of {PROBLEMS} problems to do" in output
    assert table_of(output) == table_of(evaluated[1])

    def order(row: dict[str, Any]) -> tuple[int, int]:
        return row["problem"], row["sample"]

    assert sorted(saved(out), key=order) == sorted(saved(evaluated[0]), key=order)


def test_benches_do_not_disturb_training(
    finished: tuple[Run, str], model: Path, tmp_path: Path
) -> None:
    """With benchmarks after every rollout, all that is trained on stays the same, bit for bit."""
    run = start(
        tmp_path,
        model,
        [
            f"eval.benches=['{BENCH}']",
            "eval.problems=6",
            "eval.samples=4",
            "eval.every=1",
        ],
    )
    code, output = run.wait()
    assert code == 0, output
    assert output.count(f"{BENCH} avg@4 0.") == 3
    for kind in ("step", "rollout"):
        assert untimed(run.metrics(kind)) == untimed(finished[0].metrics(kind))
    evals = run.metrics("eval")
    assert [record["number"] for record in evals] == [0, 1, 2]
    without = finished[0].metrics("eval")
    for name in ("heldout_reward", "heldout_response_length"):
        assert evals[0][name] == without[0][name]
        assert evals[2][name] == without[1][name]
    for record in evals:
        file = run.run_folder / "evaluations" / f"{record['number']:06d}" / f"{BENCH}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == 24
        assert record[f"{BENCH}/avg@4"] == pytest.approx(sum(r["score"] for r in rows) / 24)
        assert record[f"{BENCH}/pass@4"] >= record[f"{BENCH}/avg@4"]


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a clock said, and the memory that was used."""
    clocks = ("time/", "tokens_per_s", "seconds", "memory/")
    return [
        {name: value for name, value in record.items() if not any(c in name for c in clocks)}
        for record in records
    ]
