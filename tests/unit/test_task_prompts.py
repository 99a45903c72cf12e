# SPDX-License-Identifier: Apache-2.0
"""Prompt batches: the order, the cursor, the length limit, and what belongs to one set of data."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.rl.data.prompt_batch import PromptBatch, pack_prompts
from megatron.rl.data.prompt_source import HELDOUT_ID_OFFSET, PromptSource
from megatron.rl.errors import UserError
from megatron.rl.rewards.registry import TaskSpec, make_task
from megatron.rl.rewards.task import Prompt

TASK = make_task(TaskSpec("reasoning_gym/spell_backward", {"min_word_len": 3, "max_word_len": 5}))


class NumberedTask:
    """Prompt i is the text of i % distinct; both splits have their own texts."""

    name = "numbered"

    def __init__(self, distinct=10**9):
        self.distinct = distinct

    def prompt(self, split, seed, index):
        return Prompt(f"{split} {index % self.distinct}", split, index, {})

    def reward(self, response_text, prompt):
        return 0.0


class FiniteTask:
    """Some texts a split; the seed has no say."""

    name = "finite"

    def __init__(self, train, heldout=("held out",), answer="1"):
        self.texts = {"train": list(train), "heldout": list(heldout)}
        self.answer = answer

    def num_prompts(self, split):
        return len(self.texts[split])

    def prompt(self, split, seed, index):
        return Prompt(self.texts[split][index], split, index, {"answer": self.answer})

    def reward(self, response_text, prompt):
        return 0.0


def encode(text):
    return [ord(letter) for letter in text]


def source(task=TASK, **changes):
    settings = {"seed": 5, "max_prompt_tokens": 100, "prompts_per_epoch": 24} | changes
    return PromptSource(task, encode, **settings)


def texts(batch):
    return [prompt.text for prompt in batch.prompts]


def test_task_batches_hold_what_was_encoded():
    batch = source().next_batch(7)
    assert len(batch) == 7 and batch.prompt_ids.tolist() == list(range(7))
    assert [batch.tokens_of(i).tolist() for i in range(7)] == [encode(t) for t in texts(batch)]
    assert (batch.prompt_tokens.dtype, batch.offsets.dtype) == (np.int32, np.int64)


def test_task_batches_refuse_what_does_not_fit_together():
    prompt = TASK.prompt("train", 0, 0)
    with pytest.raises(ValueError, match="offsets must rise"):
        pack_prompts([[1, 2], []], [0, 1], [prompt, prompt])
    with pytest.raises(ValueError, match="as many ids"):
        pack_prompts([[1, 2], [3]], [0], [prompt, prompt])
    with pytest.raises(ValueError, match="int32"):
        PromptBatch(np.zeros(1), np.array([0, 1]), np.array([0]), (prompt,))


def test_task_order_is_a_permutation_by_seed_and_epoch():
    epochs = source()
    first, second = epochs.next_batch(24), epochs.next_batch(24)
    assert sorted(p.index for p in first.prompts) == list(range(24))
    assert texts(first) != texts(second) and sorted(texts(first)) == sorted(texts(second))
    assert not set(first.prompt_ids.tolist()) & set(second.prompt_ids.tolist())
    assert texts(source().next_batch(24)) == texts(first)
    assert sorted(texts(source(seed=6).next_batch(24))) != sorted(texts(first))


def test_task_cursor_resumes_in_the_middle_of_an_epoch():
    straight = source(max_prompt_tokens=52)
    batches = [straight.next_batch(5) for _ in range(9)]
    stopped = source(max_prompt_tokens=52)
    for _ in range(4):
        stopped.next_batch(5)
    state = json.loads(json.dumps(stopped.state()))
    resumed = source(max_prompt_tokens=52)
    resumed.load_state(state)
    for batch in batches[4:]:
        again = resumed.next_batch(5)
        np.testing.assert_array_equal(again.prompt_ids, batch.prompt_ids)
        np.testing.assert_array_equal(again.prompt_tokens, batch.prompt_tokens)
    assert resumed.state() == straight.state()
    with pytest.raises(UserError, match="drawn with seed 5"):
        source(seed=6).load_state(state)


def test_task_long_prompts_are_dropped_and_counted_never_cut():
    limited = source(max_prompt_tokens=52)
    batches = [limited.next_batch(10) for _ in range(3)]
    drawn = limited.state()["next_draw"]
    assert all(len(text) <= 52 for batch in batches for text in texts(batch))
    assert limited.dropped == sum(batch.dropped for batch in batches) == drawn - 30 > 0
    with pytest.raises(UserError, match=r"max_prompt_tokens"):
        source(max_prompt_tokens=10).next_batch(2)


def test_task_heldout_is_one_fixed_set_without_repeats():
    one, other = source().heldout(50), source(seed=9).heldout(50)
    assert texts(one) == texts(other) and len(set(texts(one))) == 50
    assert all(prompt.split == "heldout" for prompt in one.prompts)
    assert one.prompt_ids.min() == HELDOUT_ID_OFFSET
    assert texts(source().heldout(20)) == texts(one)[:20]
    moved = source()
    moved.next_batch(3)
    before = moved.state()
    moved.heldout(5)
    assert moved.state() == before
    assert len(set(texts(source(NumberedTask(8)).heldout(8)))) == 8
    with pytest.raises(UserError, match="only 8 of 9"):
        source(NumberedTask(8)).heldout(9)


def finite(train, seed=5, max_prompt_tokens=100, **task):
    return PromptSource(
        FiniteTask(train, **task), encode, seed=seed, max_prompt_tokens=max_prompt_tokens
    )


def test_a_finite_task_brings_every_problem_once_an_epoch():
    questions = [f"question {i}" for i in range(37)]
    stream = texts(finite(questions).next_batch(37 * 3))
    epochs = [stream[start : start + 37] for start in (0, 37, 74)]
    assert all(sorted(epoch) == sorted(questions) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = texts(finite(questions, seed=6).next_batch(37))
    assert sorted(other) == sorted(questions) and other != epochs[0]


def test_problems_of_a_finite_task_that_are_too_long_are_skipped_in_every_epoch():
    questions = [f"question {i}" for i in range(20)] + ["long " * 50] * 3
    limited = finite(questions)
    assert sorted(texts(limited.next_batch(40))) == sorted(questions[:20] * 2)
    drawn = limited.state()["next_draw"]
    assert limited.dropped == drawn - 40 and 3 <= limited.dropped <= 6
    with pytest.raises(UserError, match="only 0 of 2 train prompts"):
        finite(["long " * 50]).next_batch(2)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.data())
def test_a_finite_stream_resumes_at_any_draw_and_across_epochs(sizes, data):
    questions = [f"question {i}" for i in range(7)] + ["long " * 50]
    straight = finite(questions)
    batches = [straight.next_batch(size) for size in sizes]
    stop = data.draw(st.integers(0, len(sizes)))
    stopped = finite(questions)
    for size in sizes[:stop]:
        stopped.next_batch(size)
    resumed = finite(questions)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    for batch, size in zip(batches[stop:], sizes[stop:], strict=True):
        again = resumed.next_batch(size)
        assert texts(again) == texts(batch)
        np.testing.assert_array_equal(again.prompt_ids, batch.prompt_ids)
    assert resumed.state() == straight.state()


def test_a_state_belongs_to_its_data():
    questions = [f"question {i}" for i in range(8)]
    state = finite(questions).state()
    finite(list(questions)).load_state(state)
    others = (
        finite([*questions[:-1], "question 8"]),
        finite(questions[::-1]),
        finite(questions, answer="2"),
        finite([*questions, "one more"]),
        finite(questions, seed=6),
    )
    for other in others:
        with pytest.raises(UserError, match="same data and settings"):
            other.load_state(state)
    with pytest.raises(UserError, match="drawn with problems finite-less"):
        finite(questions).load_state({**state, "data": "finite-less"})
    # A task that makes its prompts is known by its name.
    assert source().state()["data"] == TASK.name


def test_heldout_of_a_finite_task_is_its_first_problems_or_all():
    heldout = ["a", "b", "a", "long " * 50, "c"]
    one = finite(["q"], heldout=heldout)
    assert texts(one.heldout(2)) == ["a", "b"]
    everything = one.heldout(None)
    assert texts(everything) == ["a", "b", "c"] and everything.dropped == 1
    with pytest.raises(UserError, match="only 3 of 4 heldout"):
        one.heldout(4)
    with pytest.raises(UserError, match="only 0 of 1 heldout"):
        finite(["q"], heldout=[]).heldout(None)
    with pytest.raises(UserError, match="never end"):
        source().heldout(None)


def test_an_epoch_of_a_finite_task_has_no_other_length():
    with pytest.raises(UserError, match="an epoch is all of its 1 problems"):
        PromptSource(FiniteTask(["q"]), encode, seed=1, max_prompt_tokens=9, prompts_per_epoch=5)
    with pytest.raises(UserError, match="at least 1, got 100 and 0"):
        finite([])
