# SPDX-License-Identifier: Apache-2.0
"""Seeded damage: to bytes, to text, to trees of plain values."""

import copy
import random
import string
from collections.abc import Sequence
from typing import Any

# Values at the edges of what a field may hold, and of other types than it expects.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 127, 2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 10**30,
    0.5, -0.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"),
    "", " ", "0", "nan", "auto", "none", "../..", "/", "\x00", "\ud800", "é\u202e\U0001f600",
    "x" * 5000, "1" * 5000, "{question}", "{", "%s", "a:b", "a.b:c", "os:system",
    [], {}, [[]], [None], [1, "a"], {"": None}, {"a": {"a": {}}}, ["x"] * 50,
)  # fmt: skip
ODD_TEXTS = (
    "\x00", "\ufeff", "\u2028", "\u0660", "é", "\U0001f600", "\x1b[31m", "\t", "\n", "\r\n", "'",
    '"', "`", "\\", "{", "}", "[", "]", "(", ")", "$", "#", "%", "&", "*", ":", "-", ",", "=", "<<",
    "!!", "0x", "1e999", "-1", "null", "true", "2001-99-99", "9" * 5000, "[" * 1100, "(" * 3000,
    "{" * 1100, "a" * 10_000,
)  # fmt: skip
_ODD_BYTES = (
    b"\x00" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"PAR1", b"{", b"]"
)  # fmt: skip


def damaged_bytes(rng: random.Random, data: bytes, edits: int | None = None) -> bytes:
    """Return the data with one to four edits: bits, bytes, ranges, its end."""
    content = bytearray(data)
    for _ in range(edits or rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(content) + 1)
        length = min(rng.choice((1, 2, 8, 64, 1000)), len(content) - place)
        match rng.randrange(8):
            case 0 | 1 if place < len(content):
                content[place] ^= 1 << rng.randrange(8)
            case 2:
                content[place : place + length] = rng.randbytes(length)
            case 3:
                del content[place:]
            case 4:
                del content[place : place + length]
            case 5:
                content[place:place] = rng.randbytes(rng.choice((1, 4, 100)))
            case 6:
                content[place:place] = content[place : place + length]
            case _:
                odd = rng.choice(_ODD_BYTES)
                content[place : place + len(odd)] = odd
    return bytes(content)


def damaged_text(
    rng: random.Random, text: str, fragments: Sequence[str] = (), edits: int | None = None
) -> str:
    """Return the text with one to four edits: characters, fragments, lines, numbers, its end."""
    for _ in range(edits or rng.choice((1, 1, 2, 4))):
        text = _edited_text(rng, text, fragments)
    return text


def _edited_text(rng: random.Random, text: str, fragments: Sequence[str]) -> str:
    place = rng.randrange(len(text) + 1)
    end = place + rng.choice((1, 2, 5, 20))
    match rng.randrange(9):
        case 0:
            return text[:place] + rng.choice(ODD_TEXTS) + text[place:]
        case 1 | 2 if fragments:
            return text[:place] + rng.choice(fragments) + text[place:]
        case 3:
            return text[:place] + text[end:]
        case 4:
            return text[:place]
        case 5:
            lines = text.splitlines(keepends=True) or [""]
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            return "".join(lines)
        case 6:
            lines = text.splitlines(keepends=True) or [""]
            rng.shuffle(lines) if rng.random() < 0.2 else lines.pop(rng.randrange(len(lines)))
            return "".join(lines)
        case 7:
            return text[:place] + rng.choice(string.printable) + text[place + 1 :]
        case _:
            return text[:place] + text[place:end] * rng.choice((2, 3, 50)) + text[end:]


def damaged_tree(rng: random.Random, tree: Any, edits: int | None = None) -> Any:
    """Return a tree of dicts, lists and plain values with one to three of its places changed."""
    tree = copy.deepcopy(tree)
    for _ in range(edits or rng.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return rng.choice(ODD_VALUES)
        container, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(("", "x", "base", str(key) + "s", "é"))] = container.pop(key)
            case 2:
                container[key] = [container[key]]
            case 3:
                container[key] = {"x": container[key]}
            case 4:
                container[key] = copy.deepcopy(rng.choice(places)[0])
            case _:
                container[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return tree


def _places(tree: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(tree, dict):
        own = [(tree, key) for key in tree]
        return own + [place for value in tree.values() for place in _places(value)]
    if isinstance(tree, list):
        own = [(tree, index) for index in range(len(tree))]
        return own + [place for value in tree for place in _places(value)]
    return []
