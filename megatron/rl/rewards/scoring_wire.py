# SPDX-License-Identifier: Apache-2.0
"""What the trainer and a scoring process say to each other, over two pipes.

Requests may hold a pickled prompt: the trainer made it. Answers come from a process that may have
run text of the policy's: they have one fixed layout, are bounded in size, and every field is
checked.
"""

import math
import struct
from dataclasses import dataclass
from typing import BinaryIO

from megatron.rl.rewards.score import Outcome, Score

# Longer texts are not sent: no scorer has a use for them, and copying them takes time.
MAX_RESPONSE_BYTES = 16 << 20
# An answer beyond this is no answer to anything that is asked.
MAX_ANSWER_BYTES = 4096
MAX_PROBLEM_BYTES = 600

# Lone surrogates can be in a decoded text and must not end the conversation.
_ERRORS = "surrogatepass"
_NO_ANSWER = -1
# ticket, bytes of the text, bytes of the prompt
_REQUEST = struct.Struct("<QII")
# ticket, outcome, value, bytes of the answer or -1, bytes of the problem
_RESULT = struct.Struct("<QBdiH")
_OUTCOMES = {int(outcome): outcome for outcome in (Outcome.SCORED, Outcome.RAISED, Outcome.INVALID)}


class WireViolation(Exception):
    """A scoring process sent what is no answer."""


@dataclass(frozen=True)
class Request:
    """One response to be scored, with its pickled prompt."""

    ticket: int
    response: str
    prompt: bytes


def encode_text(response: str) -> bytes:
    """Return the bytes of a response as they are sent."""
    return response.encode("utf-8", _ERRORS)


def pack_request(ticket: int, response: bytes, prompt: bytes) -> bytes:
    """Return the bytes of a request; `response` is from :func:`encode_text`."""
    return _REQUEST.pack(ticket, len(response), len(prompt)) + response + prompt


def read_request(stream: BinaryIO) -> Request | None:
    """Read a request; None at the end of the stream."""
    header = stream.read(_REQUEST.size)
    if len(header) < _REQUEST.size:
        return None
    ticket, text_bytes, prompt_bytes = _REQUEST.unpack(header)
    body = stream.read(text_bytes + prompt_bytes)
    if len(body) < text_bytes + prompt_bytes:
        return None
    return Request(ticket, body[:text_bytes].decode("utf-8", _ERRORS), body[text_bytes:])


def pack_result(ticket: int, score: Score) -> bytes:
    """Return the bytes of an answer."""
    answer = b"" if score.answer is None else score.answer.encode("utf-8", _ERRORS)
    answer_bytes = len(answer)
    if score.answer is None or answer_bytes > MAX_ANSWER_BYTES:
        answer, answer_bytes = b"", _NO_ANSWER
    problem = score.problem.encode("utf-8", "replace")[:MAX_PROBLEM_BYTES]
    header = _RESULT.pack(ticket, score.outcome, score.value, answer_bytes, len(problem))
    return header + answer + problem


def take_result(buffer: bytearray, ticket: int) -> Score | None:
    """Take the answer to request `ticket` off the front of `buffer`; None until it is complete.

    Raises:
        WireViolation: these bytes are no answer to it.
    """
    if len(buffer) < _RESULT.size:
        return None
    answered, outcome, value, answer_bytes, problem_bytes = _RESULT.unpack_from(buffer)
    if (
        answered != ticket
        or outcome not in _OUTCOMES
        or not (math.isfinite(value) and 0.0 <= value <= 1.0)
        or not _NO_ANSWER <= answer_bytes <= MAX_ANSWER_BYTES
        or problem_bytes > MAX_PROBLEM_BYTES
        or (outcome != Outcome.SCORED and value != 0.0)
    ):
        raise WireViolation("sent what is no score")
    start = _RESULT.size
    middle = start + max(answer_bytes, 0)
    stop = middle + problem_bytes
    if len(buffer) < stop:
        return None
    try:
        answer = buffer[start:middle].decode("utf-8", _ERRORS)
    except UnicodeDecodeError:
        raise WireViolation("sent an answer that is no text") from None
    problem = buffer[middle:stop].decode("utf-8", "replace")
    del buffer[:stop]
    return Score(value, _OUTCOMES[outcome], None if answer_bytes < 0 else answer, problem)
