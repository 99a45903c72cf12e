# SPDX-License-Identifier: Apache-2.0
"""How a question is put to the model: through its chat template, or as plain text."""

import argparse
from collections.abc import Mapping
from typing import Any

import yaml

from megatron.rl.errors import UserError

# What a model without a chat template is shown.
BASE_TEMPLATE = "{question}\n"
QUESTION = "{question}"
TEMPLATE_NAMES = ("auto", "chat", "base")
# They only show what a template makes of a setting, and of an answer.
_PROBE_QUESTION, _PROBE_ANSWER = "1 + 1 = ?", "Two."


def add_template_arg(parser: argparse.ArgumentParser) -> None:
    """Add ``--template-arg``, which collects pairs of a name and a value."""
    parser.add_argument(
        "--template-arg",
        type=_name_and_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the chat template, such as enable_thinking=false; may be repeated",
    )


def check_template(template: str, system_prompt: str | None, args: Mapping[str, Any]) -> None:
    """Check what can be checked without the model.

    Raises:
        UserError: no such template, or a setting that has no effect with it.
    """
    if template not in TEMPLATE_NAMES and QUESTION not in template:
        raise UserError(
            f"task.template: expected {', '.join(TEMPLATE_NAMES)}, or a text with {QUESTION}; got "
            f"{template!r}"
        )
    if template in ("auto", "chat"):
        return
    if system_prompt is not None:
        raise UserError(
            "task.system_prompt has no effect without a chat template; write it into "
            f"task.template, before {QUESTION}"
        )
    if args:
        raise UserError("task.template_args have no effect without a chat template; remove them")


class PromptTemplate:
    """From a question to the text that is tokenized.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: ``chat``: its chat template; ``base``: :data:`BASE_TEMPLATE`; ``auto``: the first
            where there is one and the second otherwise; or a text with ``{question}``.
        system_prompt: of the chat; None leaves the template's own.
        args: further variables of the chat template, such as ``enable_thinking``.

    Raises:
        UserError: there is no chat template but one is needed, or it ignores a setting.
    """

    def __init__(
        self, tokenizer: Any, template: str, system_prompt: str | None, args: Mapping[str, Any]
    ) -> None:
        check_template(template, system_prompt, args)
        self._tokenizer = tokenizer
        self._args = dict(args)
        self._system = [] if system_prompt is None else [_message("system", system_prompt)]
        has_chat = bool(tokenizer.chat_template)
        if template == "chat" and not has_chat:
            raise UserError(
                "task.template: the model's tokenizer has no chat template; expected base or a "
                f"text with {QUESTION}"
            )
        if template == "auto" and not has_chat:
            check_template("base", system_prompt, args)
        self._is_chat = has_chat and template in ("auto", "chat")
        self._text = template if QUESTION in template else BASE_TEMPLATE
        if self._is_chat:
            self._check_effect()

    @property
    def is_chat(self) -> bool:
        """Whether prompts go through the chat template, which writes special tokens itself."""
        return self._is_chat

    def render(self, question: str) -> str:
        """Return the text of the prompt."""
        if not self._is_chat:
            return self._text.replace(QUESTION, question)
        return self._chat(question, self._system)

    def text_after_answer(self) -> str:
        """Return what the chat template writes behind an assistant's answer; without one nothing.

        It begins with whatever ends a turn in the form that prompts have.
        """
        from jinja2.exceptions import TemplateError

        if not self._is_chat:
            return ""
        asked = [*self._system, _message("user", _PROBE_QUESTION)]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*asked, _message("assistant", _PROBE_ANSWER)], tokenize=False, **self._args
            )
        except TemplateError:  # it is for prompts alone
            return ""
        _, answer, rest = text.rpartition(_PROBE_ANSWER)
        return rest if answer else ""

    def _chat(self, question: str, system: list[dict[str, str]]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [*system, _message("user", question)],
                tokenize=False,
                add_generation_prompt=True,
                **self._args,
            )
        except TemplateError as error:
            hint = "; remove task.system_prompt" if system else ""
            raise UserError(
                f"the model's chat template refuses the prompt: {error}{hint}"
            ) from None
        return text

    def _check_effect(self) -> None:
        source = self._tokenizer.get_chat_template()
        for name in self._args:
            if name not in source:
                raise UserError(
                    f"task.template_args.{name} has no effect: the model's chat template does not "
                    "read it; remove it"
                )
        asked = self._chat(_PROBE_QUESTION, self._system)
        if self._system and asked == self._chat(_PROBE_QUESTION, []):
            raise UserError(
                "task.system_prompt has no effect: the model's chat template leaves it out; put "
                f"it into a task.template of your own, with {QUESTION}"
            )


def _name_and_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
