# SPDX-License-Identifier: Apache-2.0
"""Files and folders that survive a power cut: written, flushed, then given their name.

A rename is atomic, but only what was flushed before is sure to be behind the name; and the name
itself is only sure after its folder was flushed.
"""

import os
from pathlib import Path


def flush_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    _flush(path, os.O_RDONLY)


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    _flush(folder, os.O_RDONLY | os.O_DIRECTORY)


def write_flushed(path: Path, content: bytes) -> None:
    """Write a whole file and wait until it is on the disk; it has no name before it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
