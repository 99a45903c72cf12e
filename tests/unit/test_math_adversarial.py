# SPDX-License-Identifier: Apache-2.0
"""Hostile responses: no crash, no hang beyond the limit, exactly one score each."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.rewards.answer_format import FORMATS
from megatron.rl.rewards.math_equivalence import canonical_answer
from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_pool import ScoringPool
from megatron.rl.rewards.symbolic_answers import TooCostlyError, check_cost
from megatron.rl.rewards.task import Prompt
from tests.unit.adversarial_answers import GOLDS, responses
from tests.unit.answer_pairs import DIFFERENT, EQUAL


def read(response: str) -> None:
    """Everything that happens before sympy."""
    for form in FORMATS.values():
        answer = form.parse(response)
        if answer is None:
            continue
        assert answer.strip() == answer != ""
        assert answer in response
        assert isinstance(canonical_answer(answer), str)
        try:
            check_cost(answer)
        except TooCostlyError as error:
            assert str(error)


def test_generated_responses_are_read() -> None:
    for _, response in responses(2000, seed=0):
        read(response)


@given(st.text(max_size=300))
def test_any_text_is_read(response: str) -> None:
    read(response)
    read(f"\\boxed{{{response}}}")
    read(f"Answer: {response}")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TaskSpec:
    path = tmp_path_factory.mktemp("problems") / "golds.jsonl"
    rows = [{"problem": f"Problem {n}.", "answer": gold} for n, gold in enumerate(GOLDS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return TaskSpec("math", {"heldout": str(path)})


def prompts(golds: list[str]) -> list[Prompt]:
    made = {gold: Prompt("", "heldout", 0, {"answer": gold}) for gold in golds}
    return [made[gold] for gold in golds]


def test_verdicts_are_the_same_in_a_scoring_process(spec: TaskSpec) -> None:
    # It may open no file: whatever sympy imports late has to be there before.
    pairs = [*EQUAL, *DIFFERENT]
    pool = ScoringPool(spec, ScoringLimits(workers=2, timeout_s=60.0))
    try:
        batch = pool.score(
            [f"\\boxed{{{answer}}}" for _, answer in pairs], prompts([g for g, _ in pairs])
        )
    finally:
        pool.close()
    expected = [1.0] * len(EQUAL) + [0.0] * len(DIFFERENT)
    wrong = [
        pair for pair, got, want in zip(pairs, batch.scores, expected, strict=True) if got != want
    ]
    assert wrong == []
    assert (batch.raised, batch.invalid, batch.timed_out, batch.died) == (0, 0, 0, 0)


def score_all(spec: TaskSpec, count: int, seed: int) -> dict[str, int]:
    """Score generated responses among plain ones whose scores are known; return the counters."""
    totals = dict.fromkeys(("scored", "raised", "invalid", "timed_out", "died"), 0)
    pool = ScoringPool(spec, ScoringLimits(workers=2, timeout_s=5.0))
    pairs = list(responses(count, seed))
    try:
        for start in range(0, count, 500):
            part = pairs[start : start + 500]
            # A right and a wrong answer between any two: a score at another's place would show.
            golds = [gold for pair_gold, _ in part for gold in (pair_gold, "7", "7")]
            texts = [
                text for _, response in part for text in (response, "\\boxed{7}", "\\boxed{8}")
            ]
            batch = pool.score(texts, prompts(golds))
            assert batch.scores.shape == (len(texts),)
            assert set(batch.scores[0::3]) <= {0.0, 1.0}
            assert (batch.scores[1::3] == 1.0).all()
            assert (batch.scores[2::3] == 0.0).all()
            assert len(batch.answers) == len(texts)
            totals["scored"] += len(part)
            for counter in ("raised", "invalid", "timed_out", "died"):
                totals[counter] += getattr(batch, counter)
    finally:
        pool.close()
    return totals


def test_generated_responses_in_scoring_processes(spec: TaskSpec) -> None:
    totals = score_all(spec, 150, seed=1)
    # What would cost too much is a wrong answer, not a scorer that failed.
    assert totals["scored"] == 150 and totals["raised"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_fifty_thousand_generated_responses(spec: TaskSpec, seed: int) -> None:
    totals = score_all(spec, 5000, seed)
    print(totals)
    assert totals["scored"] == 5000 and totals["raised"] == totals["invalid"] == 0
    # The cheap checks leave little for the limits to end.
    assert totals["timed_out"] + totals["died"] < 50
