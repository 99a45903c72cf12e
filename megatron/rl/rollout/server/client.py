# SPDX-License-Identifier: Apache-2.0
"""HTTP to one vLLM server: JSON out and in, a bearer token, no redirects, no proxies, no retries
but the one that is safe.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from ..errors import EngineConfigError, EngineDied, EngineError, EngineRequestError, EngineTimeout
from .url import ServerAddress, check_peer

CONNECT_TIMEOUT_S = 10.0
# 8,192 tokens with K = 20 need 11 MB of JSON.
MAX_RESPONSE_BYTES = 1 << 28
_MESSAGE_CHARS = 400
_CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class ServerStatusError(EngineError):
    """The server answered, and the answer is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Requests to one server, from any number of threads; each keeps its own connection.

    The token goes into a header and nowhere else: no message and no representation holds it.
    """

    def __init__(self, address: ServerAddress, token: str | None) -> None:
        self._address = address
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._kept: set[http.client.HTTPConnection] = set()
        self._interrupted = False

    def get(self, path: str, timeout_s: float, **query: str) -> Any:
        """GET and return the decoded JSON."""
        return _decode(path, self.get_bytes(path, timeout_s, **query))

    def get_bytes(self, path: str, timeout_s: float, **query: str) -> bytes:
        """GET and return the body as it is."""
        return self._once("GET", _with_query(path, query), None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float, **query: str) -> Any:
        """POST on a connection of its own, exactly once: for requests that change the server."""
        payload = json.dumps(body).encode()
        return _decode(path, self._once("POST", _with_query(path, query), payload, timeout_s))

    def post_again(self, path: str, body: Any, timeout_s: float | None) -> Any:
        """POST on this thread's kept connection, for requests that may be made twice.

        A server closes a kept connection when it likes. Where it did so before the first byte of
        an answer, the request is made once more on a new connection.
        """
        payload = json.dumps(body).encode()
        kept: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if kept is not None and kept.sock is not None:
            with contextlib.suppress(*_CLOSED):
                return _decode(path, self._exchange(kept, "POST", path, payload, timeout_s))
            self._drop(kept)
        self._local.connection = connection = self._connect(path)
        with self._lock:
            self._kept.add(connection)
        try:
            return _decode(path, self._exchange(connection, "POST", path, payload, timeout_s))
        except _CLOSED as error:
            raise self._gone(path, error) from None

    def interrupt(self) -> None:
        """End every exchange that runs in another thread; they raise EngineDied."""
        with self._lock:
            self._interrupted = True
            for connection in self._open:
                sock = connection.sock
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def resume(self) -> None:
        """Allow exchanges again after `interrupt`, once the threads are back."""
        with self._lock:
            self._interrupted = False

    def close_kept(self) -> None:
        """Close the connections that threads kept, once these threads have ended."""
        with self._lock:
            kept = list(self._kept)
        for connection in kept:
            self._drop(connection)

    def _once(self, method: str, path: str, payload: bytes | None, timeout_s: float) -> bytes:
        connection = self._connect(path)
        try:
            return self._exchange(connection, method, path, payload, timeout_s)
        except _CLOSED as error:
            raise self._gone(path, error) from None
        finally:
            self._drop(connection)

    def _connect(self, path: str) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        connection = (
            http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
            if self._tls is None
            else http.client.HTTPSConnection(
                host, port, timeout=CONNECT_TIMEOUT_S, context=self._tls
            )
        )
        try:
            connection.connect()
            check_peer(self._address, connection.sock)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except ssl.SSLError as error:
            connection.close()
            raise EngineConfigError(
                f"no TLS with {self._address}: {error.reason}. Use http:// for a server without "
                "TLS; for a certificate of your own set SSL_CERT_FILE"
            ) from None
        except EngineConfigError:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            raise self._gone(path, error) from None
        with self._lock:
            self._open.add(connection)
            interrupted = self._interrupted
        if interrupted:
            self._drop(connection)
            raise EngineDied(f"{path}: interrupted")
        return connection

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        payload: bytes | None,
        timeout_s: float | None,
    ) -> bytes:
        """One request and its answer. Raises ServerStatusError for anything but success."""
        with self._errors(path, timeout_s):
            connection.sock.settimeout(timeout_s)
            connection.request(method, self._address.prefix + path, payload, self._headers)
            response = connection.getresponse()
            try:
                body = response.read(MAX_RESPONSE_BYTES + 1)
            except _CLOSED as error:  # an answer had begun: the request is not made again
                raise self._gone(path, error) from None
        if len(body) > MAX_RESPONSE_BYTES:
            raise EngineError(f"{path}: the server's answer exceeds {MAX_RESPONSE_BYTES} bytes")
        if 300 <= response.status < 400:
            raise EngineConfigError(
                f"{path}: the server at {self._address} redirects (status {response.status}), "
                "which is not followed: set rollout.server_url to where it leads"
            )
        if response.status != http.client.OK:
            raise self._status_error(path, response.status, body)
        return body

    @contextlib.contextmanager
    def _errors(self, path: str, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            if timeout_s is None:  # the system found the other end gone (SO_KEEPALIVE)
                raise self._gone(path, error) from None
            raise EngineTimeout(
                f"{path}: the server at {self._address} did not answer within {timeout_s:.0f} s"
            ) from None
        except _CLOSED:
            if self._interrupted:
                raise EngineDied(f"{path}: interrupted") from None
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(path, error) from None

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._open.discard(connection)
            self._kept.discard(connection)
        connection.close()

    def _gone(self, path: str, error: Exception) -> EngineDied:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return EngineDied(f"{path}: no answer from the server at {self._address} ({why})")

    def _status_error(self, path: str, status: int, body: bytes) -> EngineError:
        text = f"{path}: the server at {self._address} says {status}: {_message(body)}"
        if status == http.client.UNAUTHORIZED:
            return EngineConfigError(
                f"{text}. It wants a token: export its --api-key in an environment variable and "
                "name that in rollout.server_token_variable"
            )
        if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY):
            return EngineRequestError(text)
        return ServerStatusError(status, text)


def _with_query(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _decode(path: str, body: bytes) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError:
        raise EngineError(f"{path}: the server's answer is no JSON: {body[:80]!r}") from None


def _message(body: bytes) -> str:
    """What an error's body says, in one line."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_CHARS else line[:_MESSAGE_CHARS] + " ..."
