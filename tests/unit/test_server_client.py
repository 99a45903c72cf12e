# SPDX-License-Identifier: Apache-2.0
"""HTTP to a server that misbehaves: redirects, closed connections, silence, errors."""

import http.client
import io
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron.rl.rollout.errors import (
    EngineConfigError,
    EngineDied,
    EngineError,
    EngineRequestError,
    EngineTimeout,
)
from megatron.rl.rollout.server.client import ServerClient, ServerStatusError
from megatron.rl.rollout.server.url import parse_server_url

TOKEN = "hunter2"


class Handler(BaseHTTPRequestHandler):
    """Does what the path says; counts requests and remembers the last headers."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str | None]]
    tell: threading.Event

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.path, self.headers.get("Authorization")))
        action = self.path.strip("/").split("?")[0].removeprefix("prefix/")
        if action.isdigit():
            headers = {"Location": "/ok"} if action.startswith("3") else {}
            return self.answer(int(action), {"error": {"message": f"no {action}\nat all"}}, headers)
        if action == "silence":
            self.tell.wait(20)
        if action == "close_after":
            self.close_connection = True  # without telling the client
            return self.answer(200, {"count": len(self.seen)})
        if action == "half":
            # The whole status line and half of the body, then a reset.
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            time.sleep(0.1)
            self.connection.close()
            self.wfile = io.BytesIO()
            return None
        if action == "hang_up":
            self.close_connection = True
            return None
        if action == "text":
            return self.send_body(200, b"no JSON", {})
        if action == "nothing":
            return self.send_body(200, b"", {})
        return self.answer(200, {"count": len(self.seen)})

    def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self.send_body(status, json.dumps(value).encode(), headers or {})

    def send_body(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.seen, Handler.tell = [], threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        Handler.tell.set()
        server.shutdown()


@pytest.fixture
def client(server: ThreadingHTTPServer) -> ServerClient:
    url = f"http://127.0.0.1:{server.server_port}"
    return ServerClient(parse_server_url(url, allow_remote=False), TOKEN)


def test_requests_carry_the_token_and_the_prefix(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}/prefix"
    client = ServerClient(parse_server_url(url, allow_remote=False), TOKEN)
    assert client.get("/ok", 5, level="1") == {"count": 1}
    assert client.post("/nothing", {"a": 1}, 5) is None
    assert Handler.seen == [
        ("/prefix/ok?level=1", f"Bearer {TOKEN}"),
        ("/prefix/nothing", f"Bearer {TOKEN}"),
    ]
    assert TOKEN not in repr(client)


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        ("/302", EngineConfigError, "redirects"),
        ("/307", EngineConfigError, "redirects"),
        ("/401", EngineConfigError, "server_token_variable"),
        ("/400", EngineRequestError, "says 400: no 400 at all"),
        ("/422", EngineRequestError, "says 422"),
        ("/403", ServerStatusError, "says 403"),
        ("/500", ServerStatusError, "says 500: no 500 at all"),
        ("/text", EngineError, "no JSON"),
        ("/hang_up", EngineDied, "RemoteDisconnected"),
    ],
)
def test_what_goes_wrong_is_told_apart(
    client: ServerClient, path: str, error: type[Exception], match: str
) -> None:
    for call in (client.post, client.post_again):
        with pytest.raises(error, match=match) as caught:
            call(path, {}, 5)
        assert TOKEN not in str(caught.value)
        assert "\n" not in str(caught.value)
    # Nothing is made again, and no redirect is followed: one request a call.
    assert [seen for seen, _ in Handler.seen] == [path, path]


def test_a_kept_connection_that_was_closed_is_opened_again(client: ServerClient) -> None:
    assert client.post_again("/close_after", {}, 5) == {"count": 1}
    time.sleep(0.05)
    assert client.post_again("/ok", {}, 5) == {"count": 2}  # made once
    assert client.post_again("/ok", {}, 5) == {"count": 3}
    client.close_kept()
    assert client.post_again("/ok", {}, 5) == {"count": 4}


def test_an_answer_that_breaks_off_is_not_asked_for_again(client: ServerClient) -> None:
    assert client.post_again("/ok", {}, 5) == {"count": 1}  # a kept connection
    with pytest.raises(EngineDied, match="/half"):
        client.post_again("/half", {}, 5)
    assert [seen for seen, _ in Handler.seen] == ["/ok", "/half"]


def test_a_peer_that_the_system_gives_up_on(
    client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep-alive probes that stay unanswered raise TimeoutError where no timeout was set."""

    def give_up(self: http.client.HTTPConnection) -> None:
        raise TimeoutError("Connection timed out")

    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", give_up)
    with pytest.raises(EngineDied, match="Connection timed out"):
        client.post_again("/ok", {}, None)


def test_silence(client: ServerClient) -> None:
    with pytest.raises(EngineTimeout, match="did not answer within"):
        client.post("/silence", {}, 0.1)


def test_an_interrupt_ends_what_runs_in_other_threads(client: ServerClient) -> None:
    caught: list[Exception] = []

    def run(call: Callable[..., Any]) -> None:
        try:
            call("/silence", {}, None)
        except Exception as error:
            caught.append(error)

    threads = [
        threading.Thread(target=run, args=(call,)) for call in (client.post, client.post_again)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    client.interrupt()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert [type(error) for error in caught] == [EngineDied, EngineDied]
    with pytest.raises(EngineDied, match="interrupted"):
        client.get("/ok", 5)
    client.resume()
    client.get("/ok", 5)


def test_no_server(server: ThreadingHTTPServer, client: ServerClient) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineDied, match="ConnectionRefusedError"):
        client.get("/ok", 5)
