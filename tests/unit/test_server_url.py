# SPDX-License-Identifier: Apache-2.0
"""Which addresses of a vLLM server are taken, and how its token is read."""

import socket

import pytest

from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.rollout.server.url import (
    ServerAddress,
    check_peer,
    is_loopback,
    parse_server_url,
    read_token,
)


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://127.0.0.1:8000/", "127.0.0.1", 8000, ""),
        ("http://127.8.9.10", "127.8.9.10", 80, ""),
        ("https://localhost", "localhost", 443, ""),
        ("HTTP://LOCALHOST:1", "localhost", 1, ""),
        ("http://[::1]:8000", "::1", 8000, ""),
        ("http://[::ffff:127.0.0.1]:8000", "::ffff:127.0.0.1", 8000, ""),
        ("http://127.0.0.1:8000/engine-a/v2.1/", "127.0.0.1", 8000, "/engine-a/v2.1"),
    ],
)
def test_loopback_addresses(url: str, host: str, port: int, prefix: str) -> None:
    address = parse_server_url(url, allow_remote=False)
    assert (address.host, address.port, address.prefix) == (host, port, prefix)
    assert address.loopback


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.5",
        "vllm.example.com",
        "[2001:db8::1]",
        "0.0.0.0",
        "[::]",
        "localhost.example.com",
        "127.0.0.1.example.com",
        "127.1",  # some libraries read these three as 127.0.0.1
        "2130706433",
        "0x7f000001",
        "[::ffff:10.0.0.5]",
        "localhost.",
    ],
)
def test_other_hosts_have_to_be_allowed(host: str) -> None:
    with pytest.raises(EngineConfigError, match="server_allow_remote"):
        parse_server_url(f"http://{host}:8000", allow_remote=False)
    assert not parse_server_url(f"http://{host}:8000", allow_remote=True).loopback


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://127.0.0.1:8000",
        "file:///etc/passwd",
        "http://",
        "http://:8000",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:port",
        "http://127.0.0.1:8000?x=1",
        "http://127.0.0.1:8000/?",
        "http://127.0.0.1#.example.com",
        "http://example.com\\.127.0.0.1/",
        "http://127.0.0.1:8000/a b",
        "http://127.0.0.1:8000\n",
        "http://127.0.0.1\t.example.com",
        "http://127.0.0.1/../v1",
        "http://127.0.0.1/%2e%2e",
        "http://127.0.0.1//v1",
        "http://[::1:8000",
        "http://１27.0.0.1:8000",
        "",
    ],
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(EngineConfigError, match="server_url"):
        parse_server_url(url, allow_remote=True)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000@example.com", "http://me:hunter2@127.0.0.1", "http://@127.0.0.1"]
)
def test_user_information_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(EngineConfigError, match="server_token_variable") as caught:
        parse_server_url(url, allow_remote=True)
    assert "hunter2" not in str(caught.value)


def test_a_query_is_not_repeated() -> None:
    with pytest.raises(EngineConfigError, match="a query") as caught:
        parse_server_url("http://127.0.0.1:8000/v1?api_key=hunter2", allow_remote=False)
    assert "hunter2" not in str(caught.value)
    assert "http://127.0.0.1:8000/v1" in str(caught.value)


def test_a_malformed_url_with_a_password_is_not_repeated() -> None:
    with pytest.raises(EngineConfigError) as caught:
        parse_server_url("http://me:hunter 2@127.0.0.1", allow_remote=True)
    assert "hunter" not in str(caught.value)


def test_the_address_as_text() -> None:
    for url in ("http://127.0.0.1:8000", "https://[::1]:443/a"):
        assert str(parse_server_url(url, allow_remote=False)) == url


def test_a_loopback_name_that_leads_elsewhere_is_caught_once_connected() -> None:
    address = ServerAddress("http", "localhost", 1, "", loopback=True)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        check_peer(address, sock)

    class Elsewhere(socket.socket):
        def getpeername(self) -> tuple[str, int]:
            return ("10.0.0.5", 1)

    with Elsewhere() as sock, pytest.raises(EngineConfigError, match=r"leads to 10\.0\.0\.5"):
        check_peer(address, sock)
    assert not is_loopback("10.0.0.5")


def test_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_token(None) is None
    monkeypatch.setenv("SERVER_TOKEN", "hunter2")
    assert read_token("SERVER_TOKEN") == "hunter2"
    monkeypatch.setenv("SERVER_TOKEN", "hunter2\nX-Evil: 1")
    with pytest.raises(EngineConfigError, match="header") as caught:
        read_token("SERVER_TOKEN")
    assert "hunter2" not in str(caught.value)
    monkeypatch.delenv("SERVER_TOKEN")
    with pytest.raises(EngineConfigError, match="SERVER_TOKEN, which is not set"):
        read_token("SERVER_TOKEN")
