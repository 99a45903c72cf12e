# SPDX-License-Identifier: Apache-2.0
"""Frames: what goes in comes out, and everything else is refused before it does harm."""

import json
import math
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from megatron.rl.rollout.wire import (
    Channel,
    Message,
    WireClosed,
    WireFormatError,
    WireTimeout,
    WireTruncated,
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def frame(header: dict | bytes, payload: bytes = b"", magic: bytes = b"MRL1") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<4sIQ", magic, len(raw), len(payload)) + raw + payload


def test_round_trip_keeps_types_shapes_and_special_values(ends):
    arrays = {
        "ids": np.array([[1, -1], [2**31 - 1, 0]], dtype=np.int32),
        "offsets": np.array([0, 2**40], dtype=np.int64),
        "log_probs": np.array([-0.0, -np.inf, np.nan, -1e-38], dtype=np.float32),
        "finished": np.array([True, False]),
        "empty": np.zeros((3, 0), dtype=np.float32),
        "strided": np.arange(10, dtype=np.int32)[::2],
    }
    Channel(ends[0]).send(Message("rollouts", {"id": 7, "text": "μ"}, arrays), 5)
    got = Channel(ends[1]).receive(5)
    assert (got.kind, dict(got.fields)) == ("rollouts", {"id": 7, "text": "μ"})
    assert list(got.arrays) == list(arrays)
    for name, array in arrays.items():
        assert got.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(got.arrays[name], array)


def test_a_frame_larger_than_the_socket_buffers_arrives_whole(ends):
    big = np.arange(1 << 20, dtype=np.int64)
    sender = threading.Thread(target=Channel(ends[0]).send, args=(Message("m", {}, {"a": big}), 10))
    sender.start()
    np.testing.assert_array_equal(Channel(ends[1]).receive(10).arrays["a"], big)
    sender.join()


def test_close_between_frames_and_inside_one_are_told_apart(ends):
    whole = frame({"kind": "m", "fields": {}, "arrays": []})
    ends[0].sendall(whole + whole[:-3])
    ends[0].close()
    channel = Channel(ends[1])
    assert channel.receive(5).kind == "m"
    with pytest.raises(WireTruncated, match="closed after"):
        channel.receive(5)
    with pytest.raises(WireClosed):
        channel.receive(5)


@pytest.mark.parametrize("cut", [1, 15, 16, 20])
def test_every_cut_is_noticed(ends, cut):
    ends[0].sendall(frame({"kind": "m", "fields": {}, "arrays": []})[:cut])
    ends[0].close()
    with pytest.raises(WireTruncated):
        Channel(ends[1]).receive(5)


def test_truncated_payload(ends):
    header = {
        "kind": "m",
        "fields": {},
        "arrays": [{"name": "a", "dtype": "<i4", "shape": [4]}],
    }
    ends[0].sendall(frame(header, bytes(16))[:-1])
    ends[0].close()
    with pytest.raises(WireTruncated, match="15 of 16"):
        Channel(ends[1]).receive(5)


def test_silence_times_out(ends):
    with pytest.raises(WireTimeout):
        Channel(ends[1]).receive(0.05)
    ends[0].sendall(b"MRL1")
    with pytest.raises(WireTimeout):
        Channel(ends[1]).receive(0.05)


@pytest.mark.parametrize("timeout_s", [1e9, math.inf])
def test_a_timeout_may_be_longer_than_any_wait(ends, timeout_s):
    Channel(ends[0]).send(Message("m"), timeout_s)
    assert Channel(ends[1]).receive(timeout_s).kind == "m"


def test_a_receiver_that_does_not_read_times_out_the_sender(ends):
    big = np.zeros(1 << 24, dtype=np.uint8)
    with pytest.raises(WireTimeout):
        Channel(ends[0]).send(Message("m", {}, {"a": big}), 0.05)


def test_oversized_frames_are_refused_on_both_sides(ends):
    small = {"max_header_bytes": 100, "max_payload_bytes": 64}
    with pytest.raises(WireFormatError, match=r"payload of 68 bytes .* limit of 64"):
        Channel(ends[0], **small).send(Message("m", {}, {"a": np.zeros(17, dtype=np.int32)}))
    with pytest.raises(WireFormatError, match=r"header of \d+ bytes .* limit of 100"):
        Channel(ends[0], **small).send(Message("m" * 100))
    ends[0].sendall(struct.pack("<4sIQ", b"MRL1", 10, 1 << 60))
    with pytest.raises(WireFormatError, match="payload"):
        Channel(ends[1]).receive(5)


@pytest.mark.parametrize(
    "bad", [np.zeros(2, dtype=np.float16), np.array([object()]), np.zeros(1, ">i4")]
)
def test_types_that_the_format_has_not_are_refused_by_the_sender(ends, bad):
    with pytest.raises(WireFormatError, match="dtype"):
        Channel(ends[0]).send(Message("m", {}, {"a": bad}))


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ({"kind": "m", "fields": {}, "arrays": [{"name": "a", "dtype": "|O", "shape": [1]}]}, 8),
        ({"kind": "m", "fields": {}, "arrays": [{"name": "a", "dtype": "<i4", "shape": [-1]}]}, 0),
        (
            {"kind": "m", "fields": {}, "arrays": [{"name": "a", "dtype": "<i4", "shape": [True]}]},
            4,
        ),
        ({"kind": "m", "fields": {}, "arrays": [{"name": "a", "dtype": "<i4", "shape": [3]}]}, 8),
        (
            {
                "kind": "m",
                "fields": {},
                "arrays": [{"name": "a", "dtype": "<i4", "shape": [1]}] * 2,
            },
            8,
        ),
        ({"kind": "m", "fields": {}, "arrays": [{"name": "a", "shape": [1]}]}, 4),
        ({"kind": "m", "fields": {}, "arrays": [{"name": "a", "dtype": [], "shape": [1]}]}, 4),
        (
            {
                "kind": "m",
                "fields": {},
                "arrays": [{"name": "a", "dtype": "<i4", "shape": [0, 2**62]}],
            },
            0,
        ),
        (
            {
                "kind": "m",
                "fields": {},
                "arrays": [{"name": "a", "dtype": "<i4", "shape": [0] * 70}],
            },
            0,
        ),
        (b"[" * 100_000, 0),
        ({"kind": 3, "fields": {}, "arrays": []}, 0),
        ({"kind": "m", "fields": [], "arrays": []}, 0),
        (b"\x80\x04K\x01.", 0),  # a pickle
        (b"[]", 0),
    ],
)
def test_malformed_headers_are_refused(ends, header, payload):
    ends[0].sendall(frame(header, bytes(payload)))
    with pytest.raises(WireFormatError):
        Channel(ends[1]).receive(5)


def test_foreign_bytes_are_refused(ends):
    ends[0].sendall(frame({}, magic=b"HTTP"))
    with pytest.raises(WireFormatError, match="MRL1"):
        Channel(ends[1]).receive(5)
