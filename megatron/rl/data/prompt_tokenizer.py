# SPDX-License-Identifier: Apache-2.0
"""The model's own tokenizer: prompts in, responses out, nothing encoded twice."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.rl.data.prompt_template import PromptTemplate
from megatron.rl.errors import UserError
from megatron.rl.plain_files import read_json_object

# Stands for an id that the tokenizer has no token for: models pad their vocabulary, Qwen3 from
# 151,669 to 151,936. No digit in it, since a digit could be read as an answer.
UNKNOWN_TOKEN = "<|unknown token|>"


class PromptTokenizer:
    """Turns questions into token ids, and sampled token ids into text for the scorer.

    Responses are decoded only: the tokens that the engine sampled are the tokens that are trained
    on, since encoding the decoded text again need not give them back. No padding token is needed:
    sequences are told apart by their lengths everywhere, never by a token.

    Args:
        folder: Hugging Face model folder on this machine; nothing is downloaded.
        template: ``auto``, ``chat``, ``base`` or a text with ``{question}``, see
            :class:`~megatron.rl.data.prompt_template.PromptTemplate`. All but the folder may be
            left out; a question then goes through the chat template where there is one.
        system_prompt: of the chat template.
        template_args: further variables of the chat template, such as ``enable_thinking``.

    Raises:
        UserError: no tokenizer there, no end-of-sequence token, or template settings that do not
            fit the model.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        template: str = "auto",
        system_prompt: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._tokenizer = _load(self._folder)
        self._template = PromptTemplate(
            self._tokenizer, template, system_prompt, template_args or {}
        )
        self._eos_token_ids = tuple(
            dict.fromkeys(
                [
                    *_eos_token_ids(self._folder, self._tokenizer),
                    *_end_of_turn(self._tokenizer, self._template.text_after_answer()),
                ]
            )
        )
        self._known_ids = frozenset(self._tokenizer.get_vocab().values())
        self._vocab_size = _vocab_size(self._folder)
        self._leading_ids = _leading_ids(self._tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response.

        Those of generation_config.json (or else config.json), the tokenizer's, and, where prompts
        go through a chat template, the special token with which it ends an assistant's turn. A
        base model may come with the template of its family and name only its end of text
        (Qwen3-Base: ``<|endoftext|>``, turns end with ``<|im_end|>``); its responses would go on
        behind their end.
        """
        return self._eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts go through a chat template."""
        return self._template.is_chat

    def encode_prompt(self, question: str) -> list[int]:
        """Return the token ids of a question in its template.

        Raises:
            UserError: a token that the model has no embedding for.
        """
        ids = _encode(self._tokenizer, self._template.render(question))
        # A chat template writes its special tokens itself; a text of the user's may begin with one.
        leading = self._leading_ids
        if not self._template.is_chat and ids[: len(leading)] != leading:
            ids = leading + ids
        if self._vocab_size is not None and ids and max(ids) >= self._vocab_size:
            token = self._tokenizer.convert_ids_to_tokens(max(ids))
            raise UserError(
                f"{self._folder}: the prompt has the token {token!r} of id {max(ids)}, the model's "
                f"vocabulary has {self._vocab_size} (config.json); the tokenizer has tokens that "
                "the model was not given"
            )
        return ids

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response, without the token that ended it.

        Any other special token stays visible, and so does an id that stands for no token
        (:data:`UNKNOWN_TOKEN`): a scorer must not overlook what the policy wrote.
        """
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] in self._eos_token_ids:
            ids.pop()
        if self._known_ids.issuperset(ids):
            return self._decode(ids)
        runs = itertools.groupby(ids, self._known_ids.__contains__)
        return "".join(
            self._decode(list(run)) if known else UNKNOWN_TOKEN * len(list(run))
            for known, run in runs
        )

    def _decode(self, ids: list[int]) -> str:
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


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _leading_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, such as bos.

    What some put behind it, an eos, does not belong to a prompt.
    """
    bare, whole = _encode(tokenizer, "a"), _encode(tokenizer, "a", special=True)
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def _vocab_size(folder: Path) -> int | None:
    """Return the number of the model's embeddings; None in a folder without config.json."""
    config = _json(folder / "config.json")
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return None if size is None else int(size)


def _eos_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    ids: list[int] = []
    stated = _json(folder / "generation_config.json").get("eos_token_id")
    if stated is None:
        stated = _json(folder / "config.json").get("eos_token_id")
    ids += stated if isinstance(stated, list) else [] if stated is None else [stated]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError(
            f"{folder} names no end-of-sequence token; set eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json"
        )
    return tuple(dict.fromkeys(int(token) for token in ids))


def _end_of_turn(tokenizer: Any, after_answer: str) -> list[int]:
    """Return the special token, if it is one, that a template writes behind an answer."""
    added = tokenizer.added_tokens_decoder
    first = _encode(tokenizer, after_answer.lstrip())[:1]
    return [token for token in first if token in added and added[token].special]


def _json(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}
