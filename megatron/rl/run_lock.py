# SPDX-License-Identifier: Apache-2.0
"""One run in a folder at a time."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from megatron.rl.errors import UserError

LOCK_NAME = "lock"
# A run that was just killed takes a moment to end all of its processes.
LOCK_WAIT_S = 15.0
_POLL_S = 0.1
# File systems without locks; two runs in one folder then go unnoticed.
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)


class RunLock:
    """Held until this process, and all that inherited :attr:`descriptor`, have ended.

    The kernel releases it, however they end.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of a run folder; waits :data:`LOCK_WAIT_S` for it.

        Raises:
            UserError: another process has it.
        """
        path = folder / LOCK_NAME
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self._try():
            if time.monotonic() > deadline:
                owner = path.read_text(errors="replace").strip()[:200] or "unknown"
                self.release()
                raise UserError(
                    f"a run is under way in {folder} ({owner}): wait for it to end, stop it with "
                    "SIGTERM, or take another run folder"
                )
            time.sleep(_POLL_S)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Give it up before this process ends."""
        os.close(self.descriptor)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        return True
