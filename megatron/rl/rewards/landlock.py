# SPDX-License-Identifier: Apache-2.0
"""A Landlock domain: nothing on any file system can be written, made, removed or executed.

Reading stays possible. Where the kernel can, TCP and signals to other processes are refused as
well. Needs no privileges. Layouts and bits are those of ``linux/landlock.h``.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from megatron.rl.rewards.seccomp_filter import forbid_new_privileges

# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE = 1 << 0, 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_TCP_BIND_AND_CONNECT = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def abi() -> int:
    """Return the version of the kernel's Landlock; 0 where it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    version: int = libc.syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    return max(version, 0)


def restrict(writable: Sequence[Path] = ()) -> int:
    """Put the calling thread into the domain, for good, and return the version in force.

    /dev/null stays open for writing: it is where programs send what nobody wants.

    Args:
        writable: folders in which everything stays allowed.

    Raises:
        OSError: the kernel has no Landlock, or it is switched off.
    """
    version = abi()
    if version < 1:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = _attributes(version)
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    try:
        to_null = _files(version) & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV)
        _allow(libc, ruleset, os.devnull, to_null)
        for folder in writable:
            _allow(libc, ruleset, folder, _files(version))
        forbid_new_privileges(libc)
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return version


def _allow(libc: ctypes.CDLL, ruleset: int, path: str | Path, access: int) -> None:
    """Allow this access to a file, or to everything beneath a folder."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        # struct landlock_path_beneath_attr, packed: u64 allowed_access; s32 parent_fd
        rule = struct.pack("=Qi", access, place)
        _checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(place)


def _files(version: int) -> int:
    access = _EXECUTE | _WRITE_FILE | _REMOVE_AND_MAKE
    for since, bit in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        access |= bit if version >= since else 0
    return access


def _attributes(version: int) -> bytes:
    """struct landlock_ruleset_attr, as long as this version knows it."""
    attributes = struct.pack("=Q", _files(version))
    if version >= 4:
        attributes += struct.pack("=Q", _TCP_BIND_AND_CONNECT)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    return attributes


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel refuses a Landlock domain: {os.strerror(number)}")
    return result
