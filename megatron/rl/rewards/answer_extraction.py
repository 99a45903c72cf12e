# SPDX-License-Identifier: Apache-2.0
r"""Where a response states its final answer: the last box, or the last ``Answer:`` line.

Every function reads its text a constant number of times, whatever stands in it: a policy that is
rewarded for answers writes 100,000 open braces sooner or later.
"""

import re
from collections import deque
from collections.abc import Iterator

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# A box, an escaped character (so that \{ is no brace and \\ escapes nothing), or a brace. Two
# backslashes before a box are what a policy writes that has seen boxes in JSON.
_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)(?![A-Za-z])\s*+\{)|(?P<bare>\\{1,2}(?:boxed|fbox)(?![A-Za-z]))"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# \boxed 5. Only numbers: "write it in \boxed form" gives no answer.
_BARE_NUMBER = re.compile(
    r"[ \t]*+([-+\u2212]?[0-9][0-9,]*+(?:\.[0-9]++)?)(?=[\s$.,;:)\]]|\\[)\]]|\Z)"
)
# The mark-up that models put around the word: list dots, quotes, headings, bold. The quantifiers
# are possessive (*+): nothing is tried twice.
_ANSWER_LINE = re.compile(
    r"^[ \t>#*_-]*+(?:(?:the[ \t]++)?final[ \t]++)?answer[ \t]*+(?:\*\*|__)?+[ \t]*+[:\uff1a]"
    r"[ \t]*+(?:\*\*|__)?+",
    re.IGNORECASE | re.MULTILINE,
)
_AND = re.compile(r"\b(?:and|or)\b")
_DISPLAY_MARKS = ("$$", "$", r"\[", r"\]", "**", "```")


def after_thinking(response: str) -> str | None:
    """Return what follows the thinking; None where the thinking never ended.

    Only the text behind the last ``</think>`` is the response proper: a box inside the thinking is
    a draft, and would let a policy collect the reward of whatever it tried last. A response that
    was cut off while it thought has not answered. One without the tags counts whole.
    """
    text = response.rpartition(THINK_CLOSE)[2]
    return None if THINK_OPEN in text else text


def final_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces balance.

    Of nested boxes the outer one counts. None where there is no box, where the last one is empty,
    and where a later box was begun and never finished: an incomplete answer is not an answer, and
    the box before it was about to be replaced. ``\boxed 5`` is read for numbers.
    """
    first = _BOX_COMMAND.search(text)
    if first is None:
        return None
    depth = 0
    open_boxes: list[tuple[int, int]] = []  # the depth outside of a box, the start of its content
    content: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text, first.start()):
        match token.lastgroup:
            case "box":
                open_boxes.append((depth, token.end()))
                depth += 1
            case "bare":
                number = _BARE_NUMBER.match(text, token.end())
                content = number.span(1) if number else content
            case "open":
                depth += 1
            case "close":
                depth -= 1
                if open_boxes and open_boxes[-1][0] == depth:
                    content = (open_boxes.pop()[1], token.start())
    if content is None or (open_boxes and open_boxes[-1][1] > content[1]):
        return None
    return text[slice(*content)].strip() or None


def final_answer_line(text: str) -> str | None:
    r"""Return the value of the last line that begins with ``Answer:``, in any case, bold or not.

    The value may be in a box, between dollar signs, or on the next line. Of a chain such as
    ``m+n = 256+37 = 293`` the last part is taken; a single equation is kept, since it may be the
    answer itself.
    """
    lines = deque(_ANSWER_LINE.finditer(text), maxlen=1)
    if not lines:
        return None
    rest = text[lines[0].end() :]
    line = rest.partition("\n")[0]
    if not _without_marks(line):
        if _BOX_COMMAND.search(rest):
            return final_box(rest)
        line = next((row for row in _lines(rest) if _without_marks(row)), "")
    if _BOX_COMMAND.search(line):
        return final_box(line)
    return end_of_chain(without_markup(line)) or None


def without_markup(line: str) -> str:
    """Return a one-line answer without bold marks, dollar signs and its full stop."""
    while True:
        stripped = line.strip().rstrip(".").strip("*`$ \t\r")
        stripped = stripped.removeprefix(r"\(").removesuffix(r"\)")
        stripped = stripped.removeprefix(r"\[").removesuffix(r"\]")
        if stripped == line:
            return line
        line = stripped


def end_of_chain(text: str) -> str:
    """Return the last part of ``a = b = c``; any other text as it is, ``a = 1 or a = 2`` too."""
    parts = top_level_split(text, "=")
    if len(parts) < 3 or len(top_level_split(text, ",;")) > 1 or _AND.search(text):
        return text
    return parts[-1].strip()


def top_level_split(text: str, separators: str) -> list[str]:
    """Split at single characters outside of all brackets and braces.

    A bracket of any kind opens and closes a level, since ``(3, 4]`` is one interval. The ``=`` of
    ``<=``, ``>=``, ``!=`` and ``==`` separates nothing.
    """
    parts, start, depth = [], 0, 0
    for place, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif depth == 0 and letter in separators:
            beside = text[max(place - 1, 0) : place] + text[place + 1 : place + 2]
            if letter == "=" and not set(beside).isdisjoint("<>!="):
                continue
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return parts


def _without_marks(line: str) -> str:
    for mark in _DISPLAY_MARKS:
        line = line.replace(mark, "")
    return line.strip()


def _lines(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1
