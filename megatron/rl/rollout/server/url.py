# SPDX-License-Identifier: Apache-2.0
"""Which servers may be spoken to: the address rules of `rollout.server_url`, and the token.

vLLM's control routes (pause, update weights, reset the cache, ...) ask for no token. Whoever
reaches the port can replace the weights, so an address beyond this machine has to be allowed.
"""

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ..errors import EngineConfigError

_PRINTABLE = re.compile(r"[!-~]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
ALLOW_REMOTE = (
    "its control routes ask for no token, so whoever reaches the port can replace the weights. Run "
    "the server on this machine, or set rollout.server_allow_remote where only this run can reach "
    "it"
)


@dataclass(frozen=True)
class ServerAddress:
    """A checked address. ``prefix`` goes before every path: empty, or ``/name`` behind a proxy."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    prefix: str
    loopback: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


def parse_server_url(url: str, *, allow_remote: bool) -> ServerAddress:
    """Check ``http[s]://host[:port][/prefix]``.

    Raises:
        EngineConfigError: anything else, or a host beyond this machine without ``allow_remote``.
    """
    if not _PRINTABLE.fullmatch(url) or "\\" in url:
        raise _wrong(url, "it holds spaces, control characters, backslashes or non-ASCII letters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _wrong(url, str(error)) from None
    scheme = parts.scheme
    if scheme not in ("http", "https"):
        raise _wrong(url, "it does not start with http:// or https://")
    if "@" in parts.netloc:
        # Not repeated: it may be a password.
        raise EngineConfigError(
            "rollout.server_url holds a user name or password: give the server's token in an "
            "environment variable, named by rollout.server_token_variable"
        )
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise _wrong(url, "it has a query or a fragment")
    if not parts.hostname or port == 0:
        raise _wrong(url, "it names no host or port 0")
    prefix = parts.path.rstrip("/")
    if prefix and not re.fullmatch(r"(/(?!\.\.?(/|$))[\w.~-]+)+", prefix):
        raise _wrong(url, f"its path {parts.path!r} is no plain prefix")
    loopback = is_loopback(parts.hostname)
    if not loopback and not allow_remote:
        raise EngineConfigError(
            f"rollout.server_url names {parts.hostname}, which is not this machine's loopback "
            f"interface (127.0.0.1, ::1 or localhost): {ALLOW_REMOTE}"
        )
    return ServerAddress(
        scheme,  # type: ignore[arg-type]
        parts.hostname,
        port or _DEFAULT_PORTS[scheme],
        prefix,
        loopback,
    )


def is_loopback(host: str) -> bool:
    """Whether a host as written can only mean this machine.

    Only whole addresses count. ``127.1`` or ``0x7f000001`` are read differently by different
    libraries, and a name that resolves to loopback now may resolve to something else later;
    `localhost` is checked once connected, see `check_peer`.
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_peer(address: ServerAddress, sock: socket.socket) -> None:
    """Raise EngineConfigError when a loopback name led somewhere else."""
    peer = str(sock.getpeername()[0])
    if address.loopback and not is_loopback(peer):
        raise EngineConfigError(
            f"{address.host} leads to {peer} on this machine, not to the loopback interface: "
            f"{ALLOW_REMOTE}"
        )


def read_token(variable: str | None) -> str | None:
    """The server's token from an environment variable; None when no variable is named.

    Raises:
        EngineConfigError: the variable is not set, or holds what no header can; the value is
            never repeated.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise EngineConfigError(
            f"rollout.server_token_variable names {variable}, which is not set: export the "
            "server's token (its --api-key) in it"
        )
    if not _PRINTABLE.fullmatch(token):
        raise EngineConfigError(
            f"the token in {variable} holds spaces, line ends or non-ASCII letters, which a header "
            "cannot carry"
        )
    return token


def _wrong(url: str, why: str) -> EngineConfigError:
    # What follows a question mark may be a key, and errors end up in logs.
    shown = re.split("[?#]", url)[0] if "@" not in url else "(not shown: it may hold a password)"
    return EngineConfigError(f"rollout.server_url: expected http://HOST:PORT, got {shown!r}: {why}")
