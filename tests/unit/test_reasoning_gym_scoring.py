# SPDX-License-Identifier: Apache-2.0
"""What reasoning_gym's own rules give away, raise on and evaluate, and what is made of that."""

import ast
import inspect
import os

import pytest

from megatron.rl.rewards import reasoning_gym_scoring
from megatron.rl.rewards.reasoning_gym_scoring import (
    EVALUATED_EXPRESSIONS,
    EVALUATED_LITERALS,
    may_be_evaluated,
)
from megatron.rl.rewards.reasoning_gym_task import ReasoningGymTask

EVALUATING = {"eval", "exec", "parse_expr", "sympify", "S", "literal_eval", "compile"}
WITHOUT_CONTENT = ("", "I do not know", "¤", ".", "\n\n", "{}[]()")


def tasks_and_prompts(name, count=4):
    task = ReasoningGymTask(name, {"size": 200})
    return task, [task.prompt("train", 0, index) for index in range(count)]


def own_score(task, text, prompt):
    return task._dataset.score_answer(text, dict(prompt.entry))


def called_names(function):
    tree = ast.parse(inspect.getsource(function).lstrip())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {c.id if isinstance(c, ast.Name) else getattr(c, "attr", "") for c in calls}


def test_the_data_sets_that_evaluate_answers_are_all_known():
    from reasoning_gym.factory import DATASETS

    found = set()
    for name, (data_set, _) in DATASETS.items():
        names = called_names(data_set.score_answer)
        # Rules call helpers of their own; those of the same class are read as well.
        for called in list(names):
            helper = inspect.getattr_static(data_set, called, None)
            if inspect.isfunction(helper):
                names |= called_names(helper) if not inspect.isgeneratorfunction(helper) else set()
        if names & EVALUATING:
            found.add(name)
    trusted = {"number_sorting"}  # evaluates the reference answer only
    assert found - trusted == EVALUATED_LITERALS | EVALUATED_EXPRESSIONS


@pytest.mark.parametrize("name", sorted(EVALUATED_LITERALS | EVALUATED_EXPRESSIONS))
def test_no_answer_is_run_as_code(name, monkeypatch):
    task, prompts = tasks_and_prompts(name)
    ran = []
    monkeypatch.setattr(os, "getpid", lambda: ran.append(1) or 1)
    for prompt in prompts:
        for text in (
            "__import__('os').getpid()",
            "[__import__('os').getpid()]",
            "(lambda: __import__('os').getpid())()",
            "[x.getpid() for x in [__import__('os')]]",
            "f'{__import__(\"os\").getpid()}'",
            "().__class__.__base__.__subclasses__()",
        ):
            assert task.reward(text, prompt) == 0.0
    assert not ran
    # It is this file that keeps it from running, not the data set.
    monkeypatch.setattr(reasoning_gym_scoring, "may_be_evaluated", lambda *_: True)
    task.reward("__import__('os').getpid()", prompts[0])
    assert ran


@pytest.mark.parametrize("name", sorted(EVALUATED_EXPRESSIONS - {"intermediate_integration"}))
def test_right_expressions_are_still_right(name):
    task, prompts = tasks_and_prompts(name)
    for prompt in prompts:
        if prompt.entry["answer"] is None:
            continue
        answer = task.reference_answer(prompt)
        assert task.reward(answer, prompt) == 1.0
        assert task.reward(f"({answer})", prompt) == own_score(task, f"({answer})", prompt) == 1.0


def test_what_may_be_evaluated():
    for text in ("2*x**2 - sin(x)/3 + C", "(1 + 2)*3", "-x", "exp(2*y)", "1.5*sqrt(z)"):
        assert may_be_evaluated("simple_integration", text)
    for text in (
        "x.diff()", "'a'", "[1]", "x if x else y", "x[0]", "lambda: 1", "open(1)", "exp(**{})",
        "5!", "(" * 5000, "-" * 100_000, "x_", "1 " * 10_000, "True", "1j", "", "\0",
    ):  # fmt: skip
        assert not may_be_evaluated("simple_integration", text), text[:20]
    for text in ("[[1, 0], [0, 1]]", "_ Q _\nQ _ _", "('a', 'b')", "1 2 3", "", "0 1\n1 0"):
        assert may_be_evaluated("n_queens", text)
    for text in ("[1] * 10", "[x for x in y]", "exit()", "a.b", "-" * 100_000, "[" * 20_000):
        assert not may_be_evaluated("n_queens", text), text[:20]
    assert may_be_evaluated("spell_backward", "__import__('os')")


def test_a_list_in_place_of_the_text_keeps_its_partial_credit():
    task, prompts = tasks_and_prompts("binary_matrix")
    solution = str(prompts[0].entry["metadata"]["solution"])
    assert task.reward(solution, prompts[0]) == own_score(task, solution, prompts[0]) == 0.1


@pytest.mark.parametrize(
    "name",
    ["advanced_geometry", "arc_agi", "color_cube_rotation", "countdown", "emoji_mystery",
     "fraction_simplification", "game_of_life_halting", "palindrome_generation", "power_function",
     "puzzle24", "gsm_symbolic"],
)  # fmt: skip
def test_nothing_is_given_for_nothing(name):
    task, prompts = tasks_and_prompts(name)
    gives_away = 0.0
    for prompt in prompts:
        for text in WITHOUT_CONTENT:
            gives_away = max(gives_away, own_score(task, text, prompt))
            assert task.reward(text, prompt) == 0.0
        if prompt.entry["answer"] is not None:
            answer = str(prompt.entry["answer"])
            assert task.reward(answer, prompt) == own_score(task, answer, prompt)
    assert gives_away > 0 or name == "gsm_symbolic"


def test_a_full_score_for_any_text_is_no_score():
    task, prompts = tasks_and_prompts("game_of_life_halting", 20)
    answers = [str(prompt.entry["answer"]) for prompt in prompts]
    assert set(answers) == {"True", "False"}
    other = {"True": "False", "False": "True"}
    for prompt, answer in zip(prompts, answers, strict=True):
        assert own_score(task, other[answer], prompt) == 1.0
        assert task.reward(other[answer], prompt) == 0.0
        assert task.reward(answer, prompt) == 1.0


@pytest.mark.parametrize(
    ("name", "text"),
    [("prime_factorization", "no idea"), ("boxnet", "0"), ("boxnet", "null"),
     ("game_of_life", "{}")],
)  # fmt: skip
def test_a_text_that_a_rule_cannot_read_is_a_wrong_answer(name, text):
    task, prompts = tasks_and_prompts(name)
    with pytest.raises(Exception):  # noqa: B017 - whichever
        own_score(task, text, prompts[0])
    assert task.reward(text, prompts[0]) == 0.0


def test_a_rule_that_fails_on_the_right_answer_still_raises():
    def rule(answer, entry):
        raise KeyError("metadata")

    with pytest.raises(KeyError):
        reasoning_gym_scoring.score_answer("any", rule, "x", {"answer": "y"})


def test_an_entry_stays_as_it_was():
    def rule(answer, entry):
        entry["metadata"].append(answer)
        return 0.5 if answer == "x" else 0.0

    entry = {"answer": "y", "metadata": []}
    assert reasoning_gym_scoring.score_answer("any", rule, "x", entry) == 0.5
    assert entry["metadata"] == []
