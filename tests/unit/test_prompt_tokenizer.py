# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: templates, special tokens, ends of responses, and nothing encoded twice."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron.rl.batch import MinibatchSize, pack
from megatron.rl.config import load_config
from megatron.rl.data.prompt_batch import pack_prompts
from megatron.rl.data.prompt_tokenizer import UNKNOWN_TOKEN, PromptTokenizer
from megatron.rl.errors import UserError
from megatron.rl.rewards.task import Prompt
from pdm import PolicyLossConfig
from tests.unit.test_batch import two_sequences


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


@pytest.mark.parametrize(
    ("after_answer", "stops"),
    [
        ("<turn>\n", (2, 1, 3)),  # as Qwen3-Base: a template whose end of turn is no eos
        (" <turn>", (2, 1, 3)),
        ("<end>\n<turn>", (2, 1)),  # the first of them ends the turn, and is known already
        ("<think>", (2, 1)),  # a token of its own, but not a special one
        ("\n\n", (2, 1)),
        ("{{ raise_exception('prompts only') }}", (2, 1)),
    ],
)
def test_a_chat_template_s_end_of_turn_ends_a_response(folder, after_answer, stops):
    file = json.loads((folder / "tokenizer.json").read_text())
    size = len(file["model"]["vocab"])
    shape = dict(file["added_tokens"][0])
    file["added_tokens"] += [
        {**shape, "id": size, "content": "<turn>"},
        {**shape, "id": size + 1, "content": "<think>", "special": False},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(file))
    with_chat(
        folder,
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        f"{{% if m.role == 'assistant' %}}{after_answer}{{% else %}}<end>{{% endif %}}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    tokenizer = PromptTokenizer(folder)
    stops = tuple(size if stop == 3 else stop for stop in stops)
    assert tokenizer.eos_token_ids == stops
    five = tokenizer.encode_prompt("5")[6]
    assert tokenizer.decode_response([five, stops[-1]]) == tokenizer.decode_response([five])
    # Only where prompts have the form that ends so.
    assert PromptTokenizer(folder, template="base").eos_token_ids == (2, 1)


def test_task_tokenizer_errors(folder, tmp_path):
    with pytest.raises(UserError, match="model folder"):
        PromptTokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no tokenizer"):
        PromptTokenizer(tmp_path / "empty")


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not "
    "enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def with_chat(folder, template=CHAT):
    (folder / "chat_template.jinja").write_text(template)
    return folder


def shown(folder, question="2 + 2 =", **settings):
    tokenizer = PromptTokenizer(folder, **settings)
    return tokenizer.decode_response(tokenizer.encode_prompt(question))


def test_every_template_on_a_model_with_a_chat_template(folder):
    with_chat(folder)
    chat = "<user>2 + 2 =<end><assistant>"
    assert shown(folder) == shown(folder, template="auto") == shown(folder, template="chat") == chat
    assert shown(folder, template="base") == "2 + 2 =\n"
    own = "Question: {question}\nAnswer: {question}?"
    assert shown(folder, template=own) == "Question: 2 + 2 =\nAnswer: 2 + 2 =?"
    assert not PromptTokenizer(folder, template="base").has_chat_template
    # A question is text, whatever it looks like.
    assert shown(folder, "{question} {{ 1 }}", template=own).startswith(
        "Question: {question} {{ 1 }}"
    )
    assert "{{ 1 }}{% if %}" in shown(folder, "{{ 1 }}{% if %}")


def test_system_prompt_and_template_arguments(folder):
    with_chat(folder)
    assert shown(folder, system_prompt="Be short.") == (
        "<system>Be short.<end><user>2 + 2 =<end><assistant>"
    )
    quiet = shown(folder, template_args={"enable_thinking": False})
    assert quiet == "<user>2 + 2 =<end><assistant><think></think>"
    assert shown(folder, template_args={"enable_thinking": True}) == shown(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "plain"}, "expected auto, chat, base, or a text with {question}"),
        ({"template": "base", "system_prompt": "s"}, "no effect without a chat template"),
        ({"template": "Q: {question}", "template_args": {"a": 1}}, "no effect without a chat"),
        ({"template_args": {"enable_thoughts": False}}, "enable_thoughts has no effect"),
    ],
)
def test_settings_without_effect_are_refused(folder, settings, message):
    with pytest.raises(UserError, match=message):
        PromptTokenizer(with_chat(folder), **settings)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.template=plain", r"task\.template: expected auto, chat, base"),
        ("task.system_prompt=Be short.", r"task\.system_prompt has no effect"),
        ("task.template_args={enable_thinking: false}", r"task\.template_args have no effect"),
    ],
)
def test_the_config_refuses_what_needs_no_model_to_see(tmp_path, override, message):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: x}\ntask: {name: reasoning_gym/spell_backward}\n")
    assert load_config(file, [override.replace("plain", "chat")]).task.template in ("auto", "chat")
    with pytest.raises(UserError, match=message):
        load_config(file, ["task.template=base", override])


def test_a_model_without_a_chat_template_takes_no_chat_settings(folder):
    with pytest.raises(UserError, match="has no chat template"):
        PromptTokenizer(folder, template="chat")
    with pytest.raises(UserError, match=r"task\.system_prompt has no effect"):
        PromptTokenizer(folder, system_prompt="s")
    with pytest.raises(UserError, match=r"task\.template_args have no effect"):
        PromptTokenizer(folder, template_args={"enable_thinking": False})


def test_templates_that_drop_or_refuse_a_system_prompt(folder):
    only_user = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="leaves it out"):
        PromptTokenizer(with_chat(folder, only_user), system_prompt="s")
    refuses = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system!') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"No system!; remove task\.system_prompt"):
        PromptTokenizer(with_chat(folder, refuses), system_prompt="s")


def save_with_bos(folder, post):
    """The byte tokenizer with a bos, and perhaps an eos, that it puts around a text itself."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    bos = tokenizer.token_to_id("<pad>")
    pieces = [("<pad>", bos), ("<eos>", tokenizer.token_to_id("<eos>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single=post, special_tokens=pieces)
    tokenizer.save(str(file))
    return bos


@pytest.mark.parametrize("post", ["<pad> $A", "<pad> $A <eos>"])
def test_bos_is_there_once_and_an_eos_never_ends_a_prompt(folder, post):
    bos = save_with_bos(folder, post)
    five = PromptTokenizer(folder, template="{question}").encode_prompt("5")
    assert five[0] == bos and len(five) == 2
    assert PromptTokenizer(folder, template="<pad>{question}").encode_prompt("5") == five
    with_chat(folder, "<pad>{% for m in messages %}{{ m.content }}{% endfor %}")
    assert PromptTokenizer(folder).encode_prompt("5") == five
    with_chat(folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert PromptTokenizer(folder).encode_prompt("5") == five[1:]


def change_config(folder, **changes):
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for name, value in changes.items():
        settings.pop(name, None)
        if value is not None:
            settings[name] = value
    file.write_text(json.dumps(settings))


def test_end_tokens_come_from_the_model_then_the_tokenizer(folder):
    change_config(folder, eos_token="<pad>")
    assert PromptTokenizer(folder).eos_token_ids == (2, 1, 0)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert PromptTokenizer(folder).eos_token_ids == (2, 1, 0)
    (folder / "generation_config.json").unlink()
    assert PromptTokenizer(folder).eos_token_ids == (5, 0)
    (folder / "config.json").unlink()
    change_config(folder, eos_token=None)
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        PromptTokenizer(folder)


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_missing_pad_token_or_one_that_is_eos_changes_nothing(folder, pad):
    usual = PromptTokenizer(folder)
    expected = usual.encode_prompt("a<eos>b<pad>"), usual.eos_token_ids
    change_config(folder, pad_token=pad)
    tokenizer = PromptTokenizer(folder)
    assert (tokenizer.encode_prompt("a<eos>b<pad>"), tokenizer.eos_token_ids) == expected
    # An end token inside of a response is text: only the one that ended it is left out.
    eos, a = 1, tokenizer.encode_prompt("a")[0]
    assert tokenizer.decode_response([a, eos, 0, a, eos]) == "a<eos><pad>a"


@pytest.mark.parametrize("token", [0, 1, 2])
def test_packed_batches_know_lengths_only(token):
    """Sequences of pad or eos tokens alone are packed as any others: same rows, same weights."""
    usual = two_sequences()
    of_one = replace(
        usual,
        prompt_tokens=np.full_like(usual.prompt_tokens, token),
        response_tokens=np.full_like(usual.response_tokens, token),
    )
    first, second = (
        pack(
            sequences,
            np.arange(2),
            minibatch=MinibatchSize(tokens=4, sequences=2),
            loss=PolicyLossConfig(),
            pad_multiple=1,
            device=torch.device("cpu"),
        )
        for sequences in (usual, of_one)
    )
    for name in ("position_ids", "rows", "advantages", "weights", "sequence", "position"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=0)
    assert torch.equal(first.packing.cu_seqlens_q, second.packing.cu_seqlens_q)
    assert len(second.rows) == len(usual.response_tokens) and (second.weights > 0).all()
    prompts = pack_prompts([[token] * 3, [token]], [0, 1], [Prompt("", "train", 0, {})] * 2)
    assert prompts.tokens_of(0).tolist() == [token] * 3


def test_ids_without_a_token_stay_visible(folder):
    tokenizer = PromptTokenizer(folder)
    five = tokenizer.encode_prompt("5")[0]
    above = len(tokenizer.encode_prompt("x" * 300)) + 10_000
    assert tokenizer.decode_response([five, above, five, 2]) == f"5{UNKNOWN_TOKEN}5"
    assert tokenizer.decode_response([above, above + 1, 2]) == UNKNOWN_TOKEN * 2
    assert tokenizer.decode_response([above]) == UNKNOWN_TOKEN
    # No answer may be read out of it.
    assert not any(letter.isdigit() for letter in UNKNOWN_TOKEN)


def test_prompts_stay_within_the_model_s_vocabulary(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    assert max(PromptTokenizer(folder).encode_prompt("any text")) < 300
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 3}}))
    with pytest.raises(UserError, match="vocabulary has 3"):
        PromptTokenizer(folder).encode_prompt("a")


def test_responses_are_decoded_and_never_encoded_again(folder, monkeypatch):
    """With a merge, the text of two tokens would be encoded as another one."""
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["model"]["vocab"]["ab"] = len(settings["model"]["vocab"])
    settings["model"]["merges"] = [["a", "b"]]
    file.write_text(json.dumps(settings))
    tokenizer = PromptTokenizer(folder, template="{question}")
    (merged,) = tokenizer.encode_prompt("ab")
    split = tokenizer.encode_prompt("a") + tokenizer.encode_prompt("b")
    prompts = pack_prompts([[merged]], [0], [Prompt("ab", "train", 0, {})])

    def refuse(*_args, **_kwargs):
        raise AssertionError("a response was encoded")

    monkeypatch.setattr(type(tokenizer._tokenizer), "__call__", refuse)
    monkeypatch.setattr(type(tokenizer._tokenizer), "encode", refuse)
    texts = [tokenizer.decode_response(ids) for ids in ([merged, 1], [*split, 1])]
    assert texts == ["ab", "ab"] and split != [merged]
    assert prompts.tokens_of(0).tolist() == [merged]
