# SPDX-License-Identifier: Apache-2.0
"""Frames over a local stream socket: a JSON header, then the raw bytes of arrays.

    magic "MRL1" | header length u32 | payload length u64 | header (JSON) | payload

All integers and arrays are little-endian. The header names each array with dtype and shape; the
payload is their bytes in that order. There is no pickle: a frame can carry numbers and text, and
nothing that runs. Both ends check lengths against limits before they allocate.
"""

import json
import math
import select
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MRL1"
_PREFIX = struct.Struct("<4sIQ")
ALLOWED_DTYPES = frozenset({"<u2", "<i4", "<i8", "<f4", "<f8", "|b1", "|u1"})
MAX_HEADER_BYTES = 1 << 20
# Rollouts travel in parts of a few MiB; this is far above the longest sequence's and below any
# nonsense length.
MAX_PAYLOAD_BYTES = 1 << 32
# What poll() takes at most; a longer time, or an endless one, is waited for in vain anyway.
_MAX_POLL_MS = (1 << 31) - 1

if sys.byteorder != "little":  # pragma: no cover - no supported machine is big-endian
    raise ImportError("megatron.rl.rollout.wire writes little-endian arrays without swapping")


class WireError(RuntimeError):
    """The stream is unusable from here on."""


class WireClosed(WireError):
    """The other end closed between two frames."""


class WireTruncated(WireError):
    """The other end closed in the middle of a frame."""


class WireTimeout(WireError):
    """No byte moved for the allowed time."""


class WireFormatError(WireError):
    """Bytes that are no frame of this protocol, or one over the limits."""


@dataclass(frozen=True)
class Message:
    """One frame: what it is, small JSON fields, and named arrays."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class Channel:
    """Sends and receives messages on a connected socket.

    One thread may send while another receives; each direction has one user at a time.
    """

    def __init__(
        self,
        sock: socket.socket,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        # Waiting is done by poll(), with a timeout for each direction: the timeout that a socket
        # object has would be shared by both.
        sock.setblocking(False)
        self._sock = sock
        self._max_header_bytes = max_header_bytes
        self._max_payload_bytes = max_payload_bytes

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Write one frame; WireTimeout when the other end takes no byte for `timeout_s`."""
        arrays = {name: _contiguous(name, array) for name, array in message.arrays.items()}
        header = json.dumps(
            {
                "kind": message.kind,
                "fields": dict(message.fields),
                "arrays": [
                    {"name": name, "dtype": array.dtype.str, "shape": list(array.shape)}
                    for name, array in arrays.items()
                ],
            }
        ).encode()
        payload_bytes = sum(array.nbytes for array in arrays.values())
        self._check_lengths(len(header), payload_bytes)
        self._send_bytes(
            memoryview(_PREFIX.pack(MAGIC, len(header), payload_bytes) + header), timeout_s
        )
        for array in arrays.values():
            if array.nbytes:
                self._send_bytes(memoryview(array.reshape(-1).view(np.uint8)), timeout_s)

    def receive(self, timeout_s: float | None = None) -> Message:
        """Read one frame; WireTimeout when no byte arrives for `timeout_s`."""
        prefix = bytearray(_PREFIX.size)
        self._receive_into(memoryview(prefix), timeout_s, frame_started=False)
        magic, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise WireFormatError(f"a frame starts with {MAGIC!r}, got {bytes(magic)!r}")
        self._check_lengths(header_bytes, payload_bytes)
        header = bytearray(header_bytes)
        self._receive_into(memoryview(header), timeout_s, frame_started=True)
        kind, fields, specs = _parse_header(bytes(header), payload_bytes)
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in specs:
            try:
                array = np.empty(shape, dtype=dtype)
            except ValueError as error:  # no bytes, but too many dimensions or too large a size
                raise WireFormatError(
                    f"array {name!r} cannot be of shape {shape}: {error}"
                ) from None
            if array.nbytes:
                view = memoryview(array.reshape(-1).view(np.uint8))
                self._receive_into(view, timeout_s, frame_started=True)
            arrays[name] = array
        return Message(kind, fields, arrays)

    def _check_lengths(self, header_bytes: int, payload_bytes: int) -> None:
        for what, got, limit in (
            ("header", header_bytes, self._max_header_bytes),
            ("payload", payload_bytes, self._max_payload_bytes),
        ):
            if got > limit:
                raise WireFormatError(f"frame {what} of {got} bytes is above the limit of {limit}")

    def _send_bytes(self, view: memoryview, timeout_s: float | None) -> None:
        while len(view):
            if not self._wait(select.POLLOUT, timeout_s):
                raise WireTimeout(f"nothing could be sent for {timeout_s} s")
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:  # a signal or a spurious wake-up
                continue
            except OSError as error:
                raise WireClosed(f"the other end is gone ({error})") from None

    def _receive_into(
        self, view: memoryview, timeout_s: float | None, *, frame_started: bool
    ) -> None:
        expected, received = len(view), 0
        while received < expected:
            if not self._wait(select.POLLIN, timeout_s):
                raise WireTimeout(f"nothing arrived for {timeout_s} s")
            try:
                count = self._sock.recv_into(view[received:])
            except BlockingIOError:
                continue
            except OSError as error:
                raise WireClosed(f"the other end is gone ({error})") from None
            if count == 0:
                if frame_started or received:
                    raise WireTruncated(
                        f"the other end closed after {received} of {expected} bytes of a frame"
                    )
                raise WireClosed("the other end closed the connection")
            received += count

    def _wait(self, event: int, timeout_s: float | None) -> bool:
        """Whether the socket became ready, or failed, within the time."""
        poll = select.poll()
        try:
            poll.register(self._sock.fileno(), event)
        except ValueError as error:  # closed on this side, by another thread
            raise WireClosed(f"this end is closed ({error})") from None
        return bool(poll.poll(None if timeout_s is None else min(timeout_s * 1000, _MAX_POLL_MS)))


def _contiguous(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.str not in ALLOWED_DTYPES:
        raise WireFormatError(
            f"array {name!r} has dtype {array.dtype.str}; a frame carries {sorted(ALLOWED_DTYPES)}"
        )
    return np.ascontiguousarray(array)


def _parse_header(
    raw: bytes, payload_bytes: int
) -> tuple[str, dict[str, Any], list[tuple[str, str, tuple[int, ...]]]]:
    """Check every field of a header before anything is allocated from it."""
    try:
        header = json.loads(raw)
        kind, fields, entries = header["kind"], header["fields"], header["arrays"]
        specs = [(entry["name"], entry["dtype"], tuple(entry["shape"])) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireFormatError(f"unreadable frame header: {error!r}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise WireFormatError("a frame header needs a text `kind` and an object `fields`")
    total = 0
    for name, dtype, shape in specs:
        if not (isinstance(name, str) and isinstance(dtype, str) and dtype in ALLOWED_DTYPES):
            raise WireFormatError(
                f"array {name!r} has dtype {dtype!r}; a frame carries {sorted(ALLOWED_DTYPES)}"
            )
        if not all(type(size) is int and size >= 0 for size in shape):
            raise WireFormatError(f"array {name!r} has the impossible shape {shape}")
        total += math.prod(shape) * np.dtype(dtype).itemsize
    if len({name for name, _, _ in specs}) != len(specs):
        raise WireFormatError("a frame names the same array twice")
    if total != payload_bytes:
        raise WireFormatError(
            f"the arrays in the header need {total} bytes, the frame carries {payload_bytes}"
        )
    return kind, fields, specs
