# SPDX-License-Identifier: Apache-2.0
"""The tiny starting policy: its tokenizer, its files, and what an interrupted call leaves."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.errors import UserError
from megatron.rl.rewards.registry import TaskSpec, make_task

SCRIPT = Path(__file__).parents[2] / "tools" / "make_tiny_model.py"


def load_script():
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tiny_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tiny = load_script()
RANDOM = tiny.TinyModelSettings(steps=0)


def quiet(line):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    assert tiny.make_tiny_model(path, RANDOM, quiet)
    return path


@pytest.mark.parametrize(
    ("name", "params"),
    [
        (RANDOM.task, RANDOM.params),
        ("reasoning_gym/chain_sum", {"min_terms": 2, "max_terms": 3, "allow_negation": True}),
        ("reasoning_gym/complex_arithmetic", {}),
        ("reasoning_gym/emoji_mystery", {}),
    ],
)
def test_tokenizer_round_trip(name, params):
    task = make_task(TaskSpec(name, params))
    tokenizer = tiny.build_tokenizer(task, RANDOM)
    for split in ("train", "heldout"):
        for index in range(150):
            prompt = task.prompt(split, 0, index)
            for text in (prompt.text, prompt.text + "\n", task.reference_answer(prompt)):
                assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for text in ("", " ", "  a\tb\n\n", "çé 漢字 😀", "12345", "Don't  stop ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_spells_what_the_task_asks_about(folder):
    tokenizer = PromptTokenizer(folder)
    ids = tokenizer.encode_prompt("Spell this word backward (example: sun -> nus): chess")
    pieces = [tokenizer.decode_response([token]) for token in ids]
    assert pieces[:4] == ["Spell", " this", " word", " backward"]
    assert pieces[-7:] == [" ", "c", "h", "e", "s", "s", "\n"]
    assert len(tokenizer.encode_prompt("1234")) == 5
    assert tokenizer.eos_token_ids == (2,)


def test_files_load_in_transformers_under_published_names(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        stored = {name: file.get_tensor(name) for name in names}
    for layer in range(RANDOM.layers):
        for expert in range(RANDOM.experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                assert f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" in names
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} < names
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["norm_topk_prob"]) == ("qwen3_moe", True)
    assert not config["tie_word_embeddings"]

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    vocab = len(tokenizer)
    assert vocab == config["vocab_size"] == stored["lm_head.weight"].shape[0] > 40
    specials = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert len(specials) == 3 and model.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, vocab) and bool(logits.isfinite().all())


def test_finished_model_is_kept_and_another_one_replaces_it(tmp_path):
    said = []
    path = tmp_path / "model"
    assert tiny.make_tiny_model(path, RANDOM, quiet)
    weights = path / "model.safetensors"
    before, written = weights.read_bytes(), weights.stat().st_mtime_ns
    assert not tiny.make_tiny_model(path, RANDOM, said.append)
    assert "nothing to do" in said[0] and weights.stat().st_mtime_ns == written

    again = tmp_path / "again"
    tiny.make_tiny_model(again, RANDOM, quiet)
    assert (again / "model.safetensors").read_bytes() == before
    other = tiny.TinyModelSettings(steps=0, seed=1)
    assert other.digest() != RANDOM.digest()
    assert tiny.make_tiny_model(path, other, quiet)
    assert weights.read_bytes() != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_call_leaves_nothing(tmp_path, monkeypatch, error):
    def stop(self, step):
        raise error

    monkeypatch.setattr(tiny._Warmup, "_step", stop)
    with pytest.raises(error):
        tiny.make_tiny_model(tmp_path / "model", tiny.TinyModelSettings(steps=5), quiet)
    assert not list(tmp_path.iterdir())


def test_interrupted_call_keeps_the_older_model(tmp_path, monkeypatch):
    path = tmp_path / "model"
    tiny.make_tiny_model(path, RANDOM, quiet)
    monkeypatch.setattr(tiny, "_put_in_place", lambda partial, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.make_tiny_model(path, tiny.TinyModelSettings(steps=0, seed=1), quiet)
    assert not tiny.make_tiny_model(path, RANDOM, quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_warmup_learns_steps_back_and_says_when_it_missed(tmp_path, monkeypatch):
    said = []
    with pytest.raises(tiny.WarmupMissed, match=r"after 20 warm-up steps .* 0\.34 to 0\.42"):
        tiny.make_tiny_model(tmp_path / "m", tiny.TinyModelSettings(steps=20), said.append)
    assert "warm-up step 20 of at most 20" in said[-1] and not list(tmp_path.iterdir())

    # An accuracy beyond the window takes the weights back to the look before, in smaller steps.
    looks = iter([0.1, 0.9, 0.4])
    monkeypatch.setattr(tiny._Warmup, "accuracy", lambda self: next(looks))
    monkeypatch.setattr(tiny, "LOOK_EVERY", 1)
    monkeypatch.setattr(tiny, "LOOK_EVERY_NEAR", 1)
    tiny.make_tiny_model(tmp_path / "m", tiny.TinyModelSettings(steps=5), said.append)
    marker = json.loads((tmp_path / "m" / tiny.MARKER).read_text())
    assert (marker["steps"], marker["accuracy"]) == (3, 0.4)


def test_other_folders_are_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        tiny.make_tiny_model(tmp_path, RANDOM, quiet)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_command_line(tmp_path, capsys):
    out = ["--out", str(tmp_path / "model")]
    for bad in (
        [],
        [*out, "--head-dim", "16"],
        [*out, "--window", "0.5", "0.4"],
        [*out, "--params", "[]"],
        [*out, "--params", "{"],
        [*out, "--seed", "x"],
        [*out, "--heads", "3"],
    ):
        with pytest.raises(SystemExit) as stopped:
            tiny.main(bad)
        assert stopped.value.code == 2
    assert tiny.main([*out, "--task", "reasoning_gym/nothing", "--steps", "0"]) == 2
    assert tiny.main([*out, "--steps", "1"]) == 1
    assert not list(tmp_path.iterdir())
    assert tiny.main([*out, "--steps", "0"]) == 0
    assert (tmp_path / "model" / tiny.MARKER).is_file()
    assert "ready" in capsys.readouterr().out
