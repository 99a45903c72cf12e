# SPDX-License-Identifier: Apache-2.0
"""Tasks and rewards: two splits that never meet, and exactly one reward for each response."""

from typing import Any

import numpy as np
import pytest

from megatron.rl.errors import UserError
from megatron.rl.rewards.reasoning_gym_task import ReasoningGymTask, split_of
from megatron.rl.rewards.registry import make_task
from megatron.rl.rewards.scoring import score_batch
from megatron.rl.rewards.task import Prompt

SPELL = ("reasoning_gym/spell_backward", {"min_word_len": 3, "max_word_len": 5})
# 200 different questions: chance alone would put nearly each of them into both splits.
ONE_DIGIT = (
    "reasoning_gym/chain_sum",
    {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
)


def question(text: str, answer: str) -> Prompt:
    return Prompt(text, "train", 0, {"question": text, "answer": answer, "metadata": {}})


class ScriptedTask:
    """Scores that the responses themselves name; "raise" raises."""

    name = "scripted"

    def prompt(self, split: Any, seed: int, index: int) -> Prompt:
        raise NotImplementedError

    def reward(self, response_text: str, prompt: Prompt) -> Any:
        if response_text == "raise":
            raise KeyError("no answer found")
        return (
            {"none": None, "nan": float("nan"), "two": 2.0, "minus": -0.5, "word": "x"}.get(
                response_text
            )
            if not response_text[0].isdigit()
            else float(response_text)
        )


@pytest.mark.parametrize("task", [SPELL, ONE_DIGIT], ids=lambda t: t[0])
def test_task_splits_are_disjoint_for_all_seeds(task):
    made = make_task(*task)
    train = {made.prompt("train", seed, i).text for seed in (0, 1, 7) for i in range(300)}
    heldout = {made.prompt("heldout", seed, i).text for seed in (0, 1, 8) for i in range(100)}
    assert len(train) > 100 and len(heldout) > 10
    assert not train & heldout
    assert {split_of(text) for text in heldout} == {"heldout"}


def test_task_prompts_depend_on_split_seed_and_index_only():
    one, other = make_task(*SPELL), make_task(*SPELL)
    backwards = [other.prompt("train", 3, i) for i in reversed(range(50))][::-1]
    assert [one.prompt("train", 3, i) for i in range(50)] == backwards
    texts = [one.prompt("train", 3, i).text for i in range(50)]
    # Neighbouring seeds of reasoning_gym share all entries but one; ours must not.
    assert not set(texts) & {one.prompt("train", 4, i).text for i in range(50)}


def test_task_known_answers():
    task = make_task(*SPELL, exact=True)
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
    assert make_task(*SPELL).reward("ssexx", prompt) == pytest.approx(0.6)
    assert make_task(*SPELL, exact=True).reward("ssexx", prompt) == 0.0
    # An answer with the right one inside is worth a part in reasoning_gym: nothing with exact.
    sum_prompt = question("1 + 2 =", "3")
    assert make_task(*ONE_DIGIT).reward("33", sum_prompt) == 0.5
    assert make_task(*ONE_DIGIT, exact=True).reward("33", sum_prompt) == 0.0
    assert make_task(*ONE_DIGIT, exact=True).reward("3", sum_prompt) == 1.0


def test_task_one_reward_for_each_response_whatever_the_scorer_does():
    responses = ["1", "raise", "0.25", "nan", "raise", "two", "minus", "none", "word", "0.5"]
    result = score_batch(ScriptedTask(), responses, [question("q", "a")] * len(responses))
    np.testing.assert_array_equal(result.rewards, [1, 0, 0.25, 0, 0, 0, 0, 0, 0, 0.5])
    assert (result.raised, result.invalid) == (2, 5)
    assert result.first_error is not None and "KeyError" in result.first_error
    clean = score_batch(ScriptedTask(), ["1", "0"], [question("q", "a")] * 2)
    assert (clean.raised, clean.invalid, clean.first_error) == (0, 0, None)
    assert score_batch(ScriptedTask(), [], []).rewards.shape == (0,)
    with pytest.raises(ValueError, match="one prompt for each response"):
        score_batch(ScriptedTask(), ["1", "0"], [question("q", "a")])


def test_task_a_data_set_whose_scorer_really_raises():
    task = make_task("reasoning_gym/prime_factorization")
    prompts = [task.prompt("train", 0, i) for i in range(3)]
    right = [task.reference_answer(prompt) for prompt in prompts]
    result = score_batch(task, [right[0], "no idea", right[2]], prompts)
    np.testing.assert_array_equal(result.rewards, [1, 0, 1])
    assert (result.raised, result.invalid) == (1, 0)


def test_task_bad_settings_say_what_to_change():
    for name, params, message in (
        ("spell_backward", {}, "expected reasoning_gym/"),
        ("reasoning_gym/spel_backward", {}, "did you mean .*spell_backward"),
        ("reasoning_gym/spell_backward", {"max_len": 3}, "max_len: .*max_word_len"),
        ("reasoning_gym/spell_backward", {"seed": 3}, "seed has no effect"),
        ("reasoning_gym/spell_backward", {"min_word_len": 9, "max_word_len": 3}, "refuses"),
    ):
        with pytest.raises(UserError, match=message):
            make_task(name, params)


def test_task_a_split_without_questions_is_an_error():
    # Two entries, and both questions belong to the other split.
    task = ReasoningGymTask("chain_sum", {"size": 2})
    with pytest.raises(UserError, match="heldout split"):
        task.prompt("heldout", 0, 0)


def test_task_without_reference_answers_says_so():
    task = make_task("reasoning_gym/graph_color")
    with pytest.raises(UserError, match="no reference answers"):
        task.reference_answer(task.prompt("train", 0, 0))
