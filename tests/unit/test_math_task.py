# SPDX-License-Identifier: Apache-2.0
"""The task of problem files: splits, prompts, scores; and every gold answer of the public ones."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.rl.errors import UserError
from megatron.rl.rewards.answer_format import FORMATS
from megatron.rl.rewards.math_task import MathTask
from megatron.rl.rewards.registry import TaskSpec, make_task
from megatron.rl.rewards.score import Outcome, score_response
from megatron.rl.rewards.task import Prompt

PUBLIC_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SUMS = [(f"What is {a} plus {b}?", str(a + b)) for a in range(1, 11) for b in range(1, 6)]


def write(path: Path, problems: Sequence[tuple[str, str]]) -> str:
    rows = (json.dumps({"problem": text, "answer": answer}) for text, answer in problems)
    path.write_text("\n".join(rows))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "train": write(tmp_path / "train.jsonl", SUMS[:40]),
        "heldout": write(tmp_path / "heldout.jsonl", SUMS[40:]),
    }


def texts(task: MathTask, split) -> list[str]:
    return [task.prompt(split, 0, index).text for index in range(task.num_prompts(split))]


def test_prompts_are_the_problems_in_their_order(files: dict[str, str]) -> None:
    task = make_task(TaskSpec("math", files))
    assert task.name == "math"
    assert (task.num_prompts("train"), task.num_prompts("heldout")) == (40, 10)
    prompt = task.prompt("train", 7, 3)
    assert prompt.text == FORMATS["boxed"].ask("What is 1 plus 4?")
    assert prompt == task.prompt("train", 0, 3)
    assert task.prompt("train", 0, 43).text == prompt.text
    assert task.reference_answer(prompt) == "5"
    assert task.reward("It is \\boxed{5}.", prompt) == 1.0
    assert task.reward("It is \\boxed{6}.", prompt) == 0.0
    assert task.reward("It is 5.", prompt) == 0.0
    assert task.answer("It is \\boxed{05.0}.") == "5"
    assert task.answer("It is 5.") is None


def test_a_heldout_problem_is_taken_out_of_training(tmp_path: Path) -> None:
    again = [("what is  1 plus\n4?", "5"), ("What is 1 plus 5 ?", "6")]
    task = MathTask(
        train=write(tmp_path / "train.jsonl", SUMS[:40]),
        heldout=write(tmp_path / "heldout.jsonl", [*again, *SUMS[40:]]),
    )
    assert (task.num_prompts("train"), task.num_prompts("heldout")) == (38, 12)
    assert task.removed_from_train == 2
    assert not any("1 plus 4" in text or "1 plus 5" in text for text in texts(task, "train"))
    with pytest.raises(UserError, match="all 2 problems"):
        MathTask(
            train=write(tmp_path / "a.jsonl", SUMS[:2]), heldout=write(tmp_path / "b.jsonl", SUMS)
        )


def test_a_training_file_alone_gives_a_share_to_the_heldout_split(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", SUMS)
    task = MathTask(train=path)
    train, heldout = texts(task, "train"), texts(task, "heldout")
    assert len(train) + len(heldout) == len(SUMS) and 1 <= len(heldout) <= 15
    assert not set(train) & set(heldout)
    # The side of a problem does not depend on what else is in the file, nor on its order.
    other = MathTask(train=write(tmp_path / "other.jsonl", SUMS[::-1][:30]))
    assert set(texts(other, "heldout")) <= set(heldout)


def test_heldout_alone_cannot_be_trained_on(files: dict[str, str]) -> None:
    task = MathTask(heldout=files["heldout"])
    assert task.num_prompts("train") == 0
    with pytest.raises(UserError, match=r"set task\.params\.train"):
        task.prompt("train", 0, 0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "expected task.params.train"),
        ({"train": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"train": 5}, "expected the path"),
        ({"format": "box"}, "expected boxed, answer_line or as_is"),
        ({"format": "as_is"}, "use boxed or answer_line"),
        ({"style": "boxed"}, "style"),
    ],
)
def test_settings_that_cannot_work(params, message: str, files: dict[str, str]) -> None:
    given = files | params if params and "train" not in params else params
    with pytest.raises(UserError, match=message):
        make_task(TaskSpec("math", given))


def test_the_answer_line_format(files: dict[str, str]) -> None:
    task = MathTask(**files, format="answer_line")
    prompt = task.prompt("train", 0, 0)
    assert '"Answer: VALUE"' in prompt.text
    assert task.reward("1 + 1 = 2.\n\nAnswer: 2", prompt) == 1.0
    assert task.reward("\\boxed{2}", prompt) == 0.0


def test_an_answer_beyond_bounds_is_wrong_and_no_failure(files: dict[str, str]) -> None:
    task = MathTask(**files)
    prompt = task.prompt("train", 0, 0)
    score = score_response(task, "\\boxed{10^{10^{10}}}", prompt)
    assert (score.value, score.outcome) == (0.0, Outcome.SCORED)
    assert score.answer == "10^{10^{10}}"


# ---- the public files --------------------------------------------------------------------------


def altered(answer: str) -> str:
    """A wrong answer of the same make: a number of it changed, or a word."""
    for place, letter in enumerate(answer):
        # Not in an exponent or a name, and neither of 1^..: any digit that counts.
        if letter.isdigit():
            return f"{answer[:place]}{(int(letter) + 1) % 10}{answer[place + 1 :]}"
    if answer.startswith("\\text{"):
        return answer.replace("{", "{un", 1) if "(" not in answer else "\\text{(A)}"
    if answer == "p - q":
        return "q - p"
    return f"2 + {answer}"


@pytest.mark.parametrize(
    ("name", "count"), [("aime24", 30), ("aime25", 30), ("math500", 500), ("gsm8k_test", 1319)]
)
def test_every_gold_answer_scores_itself_and_nothing_else(name: str, count: int) -> None:
    path = PUBLIC_DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    tasks = {form: MathTask(heldout=str(path), format=form) for form in FORMATS}
    assert {task.num_prompts("heldout") for task in tasks.values()} == {count}
    wrong = [
        (form, gold, answer)
        for form, task in tasks.items()
        for index in range(count)
        for prompt in [task.prompt("heldout", 0, index)]
        for gold in [task.reference_answer(prompt)]
        for answer, score in ((gold, 1.0), (altered(gold), 0.0))
        if task.reward(FORMATS[form].example.replace("42", answer), prompt) != score
    ]
    assert wrong == []


def test_integers_of_the_public_files_off_by_one() -> None:
    path = PUBLIC_DATA / "gsm8k_test.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    task = MathTask(heldout=str(path))
    for index in range(task.num_prompts("heldout")):
        prompt = task.prompt("heldout", 0, index)
        gold = int(task.reference_answer(prompt).replace(",", ""))
        scores = [task.reward(f"\\boxed{{{gold + step}}}", prompt) for step in (-1, 0, 1)]
        assert scores == [0.0, 1.0, 0.0]


def test_published_prompts_are_asked_and_read_in_our_form() -> None:
    path = PUBLIC_DATA / "dapo_math_sample12.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    task = MathTask(heldout=str(path))
    # Taking an instruction off a problem may not eat into it.
    starts = {task.prompt("heldout", 0, index).text[:20] for index in range(12)}
    assert "There are $7$ boxes " in starts and "For which $n$ is $n^" in starts
    for index in range(12):
        prompt = task.prompt("heldout", 0, index)
        assert prompt.text.count("boxed") == 1 and "Answer:" not in prompt.text
        gold = task.reference_answer(prompt)
        assert task.reward(f"\\boxed{{{gold}}}", prompt) == 1.0
        assert task.reward(f"\\boxed{{{int(gold) + 1}}}", prompt) == 0.0


def test_prompts_can_be_sent_to_another_process(files: dict[str, str]) -> None:
    prompt = MathTask(**files).prompt("train", 0, 0)
    assert isinstance(prompt, Prompt) and set(map(type, prompt.entry.values())) == {str}
