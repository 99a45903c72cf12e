# SPDX-License-Identifier: Apache-2.0
"""The model's own tokenizer: prompts in, responses out, nothing encoded twice."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.rl.errors import UserError

# What a model without a chat template is shown.
BASE_TEMPLATE = "{question}\n"


class PromptTokenizer:
    """Turns questions into token ids, and sampled token ids into text for the scorer.

    A question goes through the tokenizer's chat template where there is one, with the generation
    prompt added, and through `BASE_TEMPLATE` otherwise. Responses are decoded only: the
    tokens that the engine sampled are the tokens that are trained on, since encoding the decoded
    text again need not give them back.

    Args:
        folder: Hugging Face model folder on this machine; nothing is downloaded.

    Raises:
        UserError: no tokenizer there, or no end-of-sequence token.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._tokenizer = _load(self._folder)
        self._eos_token_ids = _eos_token_ids(self._folder, self._tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: those of generation_config.json, then the tokenizer's."""
        return self._eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts go through a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode_prompt(self, question: str) -> list[int]:
        """Return the token ids of a question in its template."""
        if self.has_chat_template:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        else:
            text = BASE_TEMPLATE.replace("{question}", question)
        # A chat template writes its special tokens itself.
        encoded = self._tokenizer(
            text, add_special_tokens=not self.has_chat_template, verbose=False
        )
        return list(encoded["input_ids"])

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response, without the token that ended it.

        Any other special token stays visible: a scorer must not overlook what the policy wrote.
        """
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] in self._eos_token_ids:
            ids.pop()
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise UserError(f"model.path: expected a Hugging Face model folder, found none at {folder}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model.path: {folder} has no tokenizer that can be loaded ({reason}); expected "
            "tokenizer.json and tokenizer_config.json beside config.json"
        ) from None


def _eos_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    ids: list[int] = []
    file = folder / "generation_config.json"
    if file.is_file():
        stated = json.loads(file.read_text()).get("eos_token_id")
        ids += stated if isinstance(stated, list) else [] if stated is None else [stated]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError(
            f"{folder} names no end-of-sequence token; set eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json"
        )
    return tuple(dict.fromkeys(int(token) for token in ids))
