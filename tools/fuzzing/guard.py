# SPDX-License-Identifier: Apache-2.0
"""Nothing but one folder can be written, no program started, no connection made; attempts are seen.

Landlock refuses, for Python and for the libraries below it. Python's audit events tell who tried,
where the refusal was taken for an unreadable file.
"""

import os
import sys
from pathlib import Path
from typing import Any

from megatron.rl.rewards import landlock

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset(
    {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate",
     "os.chmod", "os.chown", "os.utime", "os.mkfifo", "os.mknod"}
)  # fmt: skip
_NEVER = frozenset(
    {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn",
     "os.fork", "socket.connect", "socket.bind"}
)  # fmt: skip


class Guard:
    """Restricts this process for good; :meth:`taken` tells what was tried since the last call."""

    def __init__(self, folder: Path) -> None:
        self._root = os.path.realpath(folder)
        self._tried: list[str] = []
        self.enforced = landlock.abi() > 0
        """Whether the kernel refuses too, beyond what the audit events tell."""
        if self.enforced:
            landlock.restrict([folder])
        sys.addaudithook(self._see)

    def taken(self) -> list[str]:
        """Return what was tried and forget it."""
        tried, self._tried = self._tried, []
        return tried

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NEVER:
            self._tried.append(f"{event} {arguments!r}"[:200])
        elif event in _CHANGES or (event == "open" and arguments[2] & _WRITES):
            # A path relative to an open folder cannot be judged here: the kernel judges it.
            relative_to_folder = (
                event != "open"
                and isinstance(arguments[-1], int)
                and (arguments[-1] >= 0 and event in ("os.remove", "os.rmdir", "os.mkdir"))
            )
            if not relative_to_folder and not self._inside(arguments[0]):
                self._tried.append(f"{event} {arguments!r}"[:200])

    def _inside(self, path: Any) -> bool:
        if isinstance(path, int):
            return True
        name = os.path.realpath(os.fsdecode(path))
        return name == os.devnull or name.startswith(self._root + os.sep)
