# SPDX-License-Identifier: Apache-2.0
"""Tasks and rewards: two splits that never meet, and exactly one reward for each response."""

import dataclasses

import numpy as np
import pytest

from megatron.rl.errors import UserError
from megatron.rl.rewards.reasoning_gym_task import ReasoningGymTask, split_of
from megatron.rl.rewards.registry import TaskSpec, make_task
from megatron.rl.rewards.scoring_pool import ScoringPool
from megatron.rl.rewards.task import Prompt

SPELL = ("reasoning_gym/spell_backward", {"min_word_len": 3, "max_word_len": 5})
# 200 different questions: chance alone would put nearly each of them into both splits.
ONE_DIGIT = (
    "reasoning_gym/chain_sum",
    {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
)

SCRIPTED = TaskSpec("tests.unit.scripted_task:ScriptedTask")


def question(text: str, answer: str) -> Prompt:
    return Prompt(text, "train", 0, {"question": text, "answer": answer, "metadata": {}})


@pytest.mark.parametrize("task", [SPELL, ONE_DIGIT], ids=lambda t: t[0])
def test_task_splits_are_disjoint_for_all_seeds(task):
    made = make_task(TaskSpec(*task))
    train = {made.prompt("train", seed, i).text for seed in (0, 1, 7) for i in range(300)}
    heldout = {made.prompt("heldout", seed, i).text for seed in (0, 1, 8) for i in range(100)}
    assert len(train) > 100 and len(heldout) > 10
    assert not train & heldout
    assert {split_of(text) for text in heldout} == {"heldout"}


def test_task_prompts_depend_on_split_seed_and_index_only():
    one, other = make_task(TaskSpec(*SPELL)), make_task(TaskSpec(*SPELL))
    backwards = [other.prompt("train", 3, i) for i in reversed(range(50))][::-1]
    assert [one.prompt("train", 3, i) for i in range(50)] == backwards
    texts = [one.prompt("train", 3, i).text for i in range(50)]
    # Neighbouring seeds of reasoning_gym share all entries but one; ours must not.
    assert not set(texts) & {one.prompt("train", 4, i).text for i in range(50)}


def test_task_known_answers():
    task = make_task(TaskSpec(*SPELL, exact=True))
    prompt = task.prompt("train", 0, 0)
    word = prompt.text.rsplit(" ", 1)[1]
    answer = word[::-1]
    assert task.reference_answer(prompt) == answer
    assert task.reward(answer, prompt) == 1.0
    assert task.reward(f" {answer}\n", prompt) == 1.0
    for wrong in ("", word + "x", answer[:-1], answer + "!", answer + " " + answer):
        assert task.reward(wrong, prompt) == 0.0


def test_task_partial_credit_unless_exact():
    prompt = question("Spell this word backward (example: sun -> nus): chess", "ssehc")
    assert make_task(TaskSpec(*SPELL)).reward("ssexx", prompt) == pytest.approx(0.6)
    assert make_task(TaskSpec(*SPELL, exact=True)).reward("ssexx", prompt) == 0.0
    # An answer with the right one inside is worth a part in reasoning_gym: nothing with exact.
    sum_prompt = question("1 + 2 =", "3")
    assert make_task(TaskSpec(*ONE_DIGIT)).reward("33", sum_prompt) == 0.5
    assert make_task(TaskSpec(*ONE_DIGIT, exact=True)).reward("33", sum_prompt) == 0.0
    assert make_task(TaskSpec(*ONE_DIGIT, exact=True)).reward("3", sum_prompt) == 1.0


def test_task_one_score_for_each_response_whatever_the_scorer_does():
    responses = ["1", "x", "0.25", "py:score = float('nan')", "", "2.0", "-0.5", "0.5"]
    with ScoringPool(SCRIPTED) as pool:
        result = pool.score(responses, [question("q", "a")] * len(responses))
        np.testing.assert_array_equal(result.scores, [1, 0, 0.25, 0, 0, 0, 0, 0.5])
        assert (result.raised, result.invalid, result.failures) == (2, 3, 5)
        assert result.first_error is not None and "ValueError" in result.first_error
        clean = pool.score(["1", "0"], [question("q", "a")] * 2)
        assert (clean.failures, clean.first_error) == (0, None)


def test_task_a_failing_answer_costs_one_score_and_shifts_no_other():
    # The score is there, the answer is not: nothing of this response may land at another place.
    responses = ["0.25", "0.125", "0.75"]
    with ScoringPool(SCRIPTED) as pool:
        result = pool.score(responses, [question("q", "a")] * 3)
    np.testing.assert_array_equal(result.scores, [0.25, 0, 0.75])
    assert result.answers == ("0.25", None, "0.75") and result.failures == 1


def test_task_a_reward_of_ones_own_scores_another_tasks_prompts():
    spec = TaskSpec(*SPELL, reward="tests.unit.scripted_task:length_reward")
    task = make_task(spec)
    prompt = task.prompt("train", 0, 0)
    assert prompt == make_task(TaskSpec(*SPELL)).prompt("train", 0, 0)
    assert task.name == SPELL[0] and task.reference_answer(prompt)
    asked = dataclasses.replace(prompt, entry={"full": 8})
    with ScoringPool(spec) as pool:
        assert pool.score(["", "abcd", "x" * 20], [asked] * 3).scores.tolist() == [0, 0.5, 1]


def test_task_bad_settings_say_what_to_change():
    for spec, message in (
        (TaskSpec("spell_backward"), "expected reasoning_gym/"),
        (TaskSpec("reasoning_gym/spel_backward"), "did you mean .*spell_backward"),
        (TaskSpec(SPELL[0], {"max_len": 3}), "max_len: .*max_word_len"),
        (TaskSpec(SPELL[0], {"seed": 3}), "seed has no effect"),
        (TaskSpec(SPELL[0], {"min_word_len": 9, "max_word_len": 3}), "refuses"),
        (TaskSpec("no.such.module:Task"), "task.name: .* cannot be imported: ModuleNotFound"),
        (TaskSpec(SCRIPTED.name, {"x": 1}), "cannot be made: TypeError"),
        (TaskSpec(SCRIPTED.name, exact=True), "task.exact has no effect"),
        (TaskSpec(*SPELL, reward="function"), "task.reward: expected package.module:function"),
        (TaskSpec(*SPELL, reward="no.such:function"), "task.reward: .* cannot be imported"),
        (TaskSpec(*SPELL, reward="tests.unit.scripted_task:nothing"), "AttributeError"),
        (TaskSpec(*SPELL, reward="tests.unit.scripted_task:NOT_CALLABLE"), "expected a function"),
        (TaskSpec(*SPELL, exact=True, reward="os:getpid"), "exact has no effect with task.reward"),
    ):
        with pytest.raises(UserError, match=message):
            make_task(spec)


def test_task_a_split_without_questions_is_an_error():
    # Two entries, and both questions belong to the other split.
    task = ReasoningGymTask("chain_sum", {"size": 2})
    with pytest.raises(UserError, match="heldout split"):
        task.prompt("heldout", 0, 0)


def test_task_without_reference_answers_says_so():
    task = make_task(TaskSpec("reasoning_gym/graph_color"))
    with pytest.raises(UserError, match="no reference answers"):
        task.reference_answer(task.prompt("train", 0, 0))
