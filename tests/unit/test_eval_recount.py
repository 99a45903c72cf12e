# SPDX-License-Identifier: Apache-2.0
"""Responses to problems of a file, scored by the math task, saved, and counted by other code."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.rl.evaluation.benches import find_bench, read_bench
from megatron.rl.evaluation.measure import measure
from megatron.rl.evaluation.responses import ResponseFile
from megatron.rl.evaluation.results import samples_of
from megatron.rl.evaluation.sample import BenchSampler
from megatron.rl.evaluation.settings import EvalSampling
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_pool import ScoringPool
from tests.unit.eval_engine import SeedEngine, WordTokenizer

GUIDE = Path(__file__).parents[2] / "docs" / "evaluation.md"
GOLDS = ("1,200", "7", "-3", "7", "0.5", "1200")
TEXTS = (
    r"It is \boxed{7}, so \boxed{1200}.",
    r"7 times \boxed{7}",
    r"\boxed{-3}",
    r"\boxed{1,200}",
    r"\boxed{0.50}",
    r"7 and no box",
    r"\boxed{7",
    "",
)
SAMPLES = 16


class Talker(WordTokenizer):
    """Turns what the engine sampled into one of a few texts."""

    def decode_response(self, tokens: Sequence[int]) -> str:
        return TEXTS[sum(tokens) % len(TEXTS)]


def recount(path: Path) -> str:
    """Run the command that the documentation gives."""
    code = re.search(r"<<'END'\n(.*?)\nEND\n", GUIDE.read_text(), re.S)
    assert code is not None
    command = [sys.executable, "-I", "-c", code.group(1), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_documented_recount_agrees(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"problem": f"What is number {i}?", "answer": gold} for i, gold in enumerate(GOLDS)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench = find_bench(f"numbers={problems}", None)
    loaded = read_bench(bench, WordTokenizer().encode_prompt, None)
    path = tmp_path / "responses.jsonl"
    pool = ScoringPool(bench.task, ScoringLimits())
    try:
        with ResponseFile(path, SAMPLES) as file:
            BenchSampler(
                bench,
                SeedEngine(),  # type: ignore[arg-type]
                Talker(),  # type: ignore[arg-type]
                pool,
                EvalSampling(samples=SAMPLES),
                lambda problem: file.append(problem.responses),
            ).sample(loaded.problems)
            metrics = measure([samples_of(group) for group in file.done.values()], has_answers=True)
            answers = {one.text: one.answer for group in file.done.values() for one in group}
    finally:
        pool.close()
    assert len(answers) == len(TEXTS), "every text was said"
    assert answers[r"\boxed{7"] is None and answers["7 and no box"] is None
    assert answers[r"\boxed{1,200}"] == answers[r"It is \boxed{7}, so \boxed{1200}."] == "1200"
    assert 0 < metrics.correct < metrics.responses
    assert metrics.unscored == 0
    assert recount(path) == f"{metrics.correct} of {metrics.responses}"
