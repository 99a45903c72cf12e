# SPDX-License-Identifier: Apache-2.0
r"""One spelling for what is written in many: fonts, spaces, brackets, full-width and typographic
characters of a short LaTeX or plain answer.

Two answers with the same normal text mean the same. Nothing is computed here.
"""

import re
import unicodedata
from functools import lru_cache

from megatron.rl.rewards.answer_extraction import top_level_split

_SPELLINGS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "’": "'", "‘": "'", "“": '"', "”": '"',
    **{mark: f"^{{{digit}}}" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{mark: f"_{{{digit}}}" for digit, mark in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **dict.fromkeys("€£¥₹", ""),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
}  # fmt: skip

# Brackets, bold marks and full stops around an answer that are taken off; each takes a scan.
MAX_WRAPPERS = 8

_SPACE = " "
_COMMANDS = {
    **dict.fromkeys(
        (r"\left", r"\right", r"\big", r"\Big", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr",
         r"\displaystyle", r"\textstyle", r"\mathbf", r"\boldsymbol", r"\bm", r"\limits",
         r"\$", r"\(", r"\)", r"\[", r"\]"),
        "",
    ),
    **dict.fromkeys((r"\,", r"\;", r"\:", r"\>", r"\ ", r"\quad", r"\qquad", "\\\n"), _SPACE),
    **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"),
    **dict.fromkeys(
        (r"\textbf", r"\textit", r"\textrm", r"\textnormal", r"\mathrm", r"\mathit", r"\mbox",
         r"\hbox", r"\operatorname", r"\textsf"),
        r"\text",
    ),
    r"\leq": r"\le", r"\leqslant": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge",
    r"\neq": r"\ne", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]",
    r"\degree": r"^\circ", r"\varnothing": r"\emptyset", r"\lvert": "|", r"\rvert": "|",
    r"\vert": "|", r"\colon": ":", r"\lt": "<", r"\gt": ">", r"\simeq": r"\approx",
}  # fmt: skip

_COMMAND = re.compile(r"\\!\s*|\\(?:[A-Za-z]+|.)", re.DOTALL)
_FIRST_ARGUMENT = re.compile(r"\\frac\s*([0-9A-Za-z])\s*(?=[0-9A-Za-z{\\])")
_SECOND_ARGUMENT = re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])")
_ROOT_ARGUMENT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*")
# A space matters between two words or digits only: "x y", "\pi r", "137 1/2".
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_WHOLE_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_TEXT_NUMBER = re.compile(r"\s*\(?[-+]?[0-9][0-9,./]*\)?\s*")


@lru_cache(maxsize=1024)
def normal_text(answer: str) -> str:
    """Return the normal spelling of an answer; it may be empty."""
    if not answer.isascii():
        answer = "".join(map(_plain_character, answer))
    text = _COMMAND.sub(lambda match: _plain_command(match.group()), answer)
    text = text.replace("$", "").replace("{,}", ",").replace("~", _SPACE)
    text = re.sub(r"(?<!\\)%", r"\%", text)
    text = _DEGREES.sub(r"^\\circ ", text)
    text = _FIRST_ARGUMENT.sub(r"\\frac{\1}", text)
    text = _SECOND_ARGUMENT.sub(r"\1{\2}", text)
    text = _ROOT_ARGUMENT.sub(r"\\sqrt{\1}", text)
    text = _LOOSE_SPACE.sub("", re.sub(r"\s+", _SPACE, text))
    return _unwrapped(text)


def _plain_character(letter: str) -> str:
    if letter.isascii():
        return letter
    known = _SPELLINGS.get(letter)
    if known is not None:
        return known
    if letter.isspace():
        return _SPACE
    digit = unicodedata.decimal(letter, None)
    if digit is not None:
        return str(digit)
    return unicodedata.normalize("NFKC", letter) if "\uff00" <= letter <= "\uffef" else letter


def _plain_command(command: str) -> str:
    if command.startswith(r"\!"):
        return ""
    return _COMMANDS.get(command, command)


def _unwrapped(text: str) -> str:
    for _ in range(MAX_WRAPPERS):
        bare = text.strip(" *`").rstrip(".,;")
        if bare.endswith("\\"):  # the rest of an escaped space or of "\\."
            bare = bare[:-1]
        if bare.startswith("{") and closes_at(bare, 0) == len(bare) - 1:
            bare = bare[1:-1]
        if bare.startswith("(") and closes_at(bare, 0) == len(bare) - 1 and not _separates(bare):
            bare = bare[1:-1]
        whole = _WHOLE_TEXT.fullmatch(bare)
        if whole and _TEXT_NUMBER.fullmatch(whole[1]):
            bare = whole[1]
        if bare == text:
            break
        text = bare
    return text


def _separates(bracketed: str) -> bool:
    return len(top_level_split(bracketed[1:-1], ",;")) > 1


def closes_at(text: str, start: int) -> int:
    """Return where the brace or bracket at `start` is closed; -1 where it is not.

    Brackets of all kinds nest in each other, and ``(3,4]`` closes.
    """
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "([{":
            depth += 1
        elif text[place] in ")]}":
            depth -= 1
            if depth == 0:
                return place
    return -1
