# SPDX-License-Identifier: Apache-2.0
"""When two questions, or two answers, are the same."""

import hashlib
import re
import unicodedata

_SPACE = re.compile(r"\s+")
# Marks that nobody sees: zero-width space and joiners, word joiner, byte order mark, soft hyphen.
_INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff\u00ad]")
_WORDS = re.compile(r"[^\W_]+|[-+*/=<>^!]")
_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)")
_MINUS_SIGNS = str.maketrans("\u2212\u2013", "--")
# Hiragana to the unified ideographs, their extensions and compatibility forms, Hangul.
_CJK = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)


def normal_text(text: str) -> str:
    """Return a text without what the eye does not tell apart: spacing, composition, marks.

    Composed by NFC, not NFKC: the latter reads x squared as x2, another problem.
    """
    visible = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return _SPACE.sub(" ", visible).strip()


def text_id(text: str) -> str:
    """Return 128 bits of a hash of the normal text, as 32 hexadecimal digits."""
    return hashlib.blake2b(normal_text(text).encode(errors="replace"), digest_size=16).hexdigest()


def words(text: str) -> tuple[str, ...]:
    """Return words, numbers and operators, lower-case; LaTeX's dollars and braces do not count."""
    return tuple(_WORDS.findall(normal_text(text).casefold()))


def integer_answer(answer: str) -> str | None:
    """Return an integer in its shortest spelling (``-5``, ``1234``); None for anything else.

    Understood are a sign, thousands commas, leading zeros and one pair of dollars around it.
    """
    bare = answer.strip()
    if len(bare) > 2 and bare[0] == bare[-1] == "$":
        bare = bare[1:-1].strip()
    bare = bare.translate(_MINUS_SIGNS)
    if not bare.isascii() or not _INTEGER.fullmatch(bare):
        return None
    digits = bare.lstrip("+-").replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if bare.startswith("-") and digits != "0" else digits


def has_cjk(text: str) -> bool:
    """Whether a text has Chinese, Japanese or Korean letters."""
    return _CJK.search(text) is not None
