# SPDX-License-Identifier: Apache-2.0
"""Prompt batches: the order, the cursor, the length limit, and the tokenizer's two templates."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron.rl.data.prompt_batch import PromptBatch, pack_prompts
from megatron.rl.data.prompt_source import HELDOUT_ID_OFFSET, PromptSource
from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.errors import UserError
from megatron.rl.rewards.registry import make_task
from megatron.rl.rewards.task import Prompt

TASK = make_task("reasoning_gym/spell_backward", {"min_word_len": 3, "max_word_len": 5})


class NumberedTask:
    """Prompt i is the text of i % distinct; both splits have their own texts."""

    name = "numbered"

    def __init__(self, distinct=10**9):
        self.distinct = distinct

    def prompt(self, split, seed, index):
        return Prompt(f"{split} {index % self.distinct}", split, index, {})

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


@pytest.fixture
def folder(tmp_path):
    """A byte tokenizer with two end tokens, the second known to generation_config.json only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<eos>", "<end>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return tmp_path


def test_task_tokenizer_base_template(folder):
    tokenizer = PromptTokenizer(folder)
    assert not tokenizer.has_chat_template
    assert tokenizer.decode_response(tokenizer.encode_prompt("2 + {x} =")) == "2 + {x} =\n"


def test_task_tokenizer_chat_template(folder):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = PromptTokenizer(folder)
    ids = tokenizer.encode_prompt("2 + 2 =")
    assert tokenizer.has_chat_template
    assert tokenizer.decode_response(ids) == "<user>2 + 2 =<end><assistant>"
    assert ids.count(2) == 1


def test_task_responses_lose_the_end_token_only(folder):
    tokenizer = PromptTokenizer(folder)
    assert tokenizer.eos_token_ids == (2, 1)
    five = tokenizer.encode_prompt("5")[0]
    for ids, text in (
        ([five, 1], "5"),
        ([five, 2], "5"),
        ([five], "5"),
        ([five, 1, 1], "5<eos>"),
        ([five, 0, five, 1], "5<pad>5"),
        ([1], ""),
        ([], ""),
        (np.array([five, 2], np.int32), "5"),
    ):
        assert tokenizer.decode_response(ids) == text


def test_task_tokenizer_errors(folder, tmp_path):
    with pytest.raises(UserError, match="model folder"):
        PromptTokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no tokenizer"):
        PromptTokenizer(tmp_path / "empty")
