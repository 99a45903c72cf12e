# SPDX-License-Identifier: Apache-2.0
"""What a process that scores responses may not do: a response can be code that the policy wrote.

No network, no other process, no thread, nothing written anywhere, no more memory than allowed, no
core file. Reading files stays possible: scorers import modules when they first need them.
"""

import ctypes
import dataclasses
import json
import os
import platform
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.rl.rewards import landlock, seccomp_filter

_MAX_OPEN_FILES = 64
_PROBE_TIMEOUT_S = 60.0
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_READ_SEARCH = 1 << 2


@dataclass(frozen=True)
class SandboxReport:
    """What is in force in a process.

    Attributes:
        system_calls: a seccomp filter refuses network, processes, threads and signals.
        files: what refuses to write: a Landlock domain, the seccomp filter, or only a file size
            limit of 0, which leaves making empty files and removing others.
        capabilities: root's privileges are gone, or were never there.
        missing: what the kernel refused, and why; empty when all is in force.
    """

    system_calls: bool
    files: Literal["landlock", "seccomp", "size_limit"]
    capabilities: bool
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing that matters for safety."""
        return self.system_calls and self.files != "size_limit" and self.capabilities

    def to_json(self) -> str:
        """Return it as JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "SandboxReport":
        """Return what :meth:`to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields | {"missing": tuple(fields["missing"])})


def enter(memory_bytes: int) -> SandboxReport:
    """Restrict the calling process, for good.

    Args:
        memory_bytes: address space that it may take beyond what it has now.

    The order matters: each step needs calls that a later one refuses.
    """
    missing: list[str] = []

    def attempt(what: str, step: Callable[[], object]) -> bool:
        try:
            step()
        except OSError as error:
            missing.append(f"{what}: {error.strerror or error}")
            return False
        return True

    _limit_resources(memory_bytes)
    capabilities = attempt("dropping capabilities", _drop_capabilities)
    in_domain = attempt("Landlock", landlock.restrict)
    filtered = attempt("seccomp", lambda: seccomp_filter.install(refuse_writing=not in_domain))
    files: Literal["landlock", "seccomp", "size_limit"] = "size_limit"
    if in_domain or filtered:
        files = "landlock" if in_domain else "seccomp"
    return SandboxReport(filtered, files, capabilities, tuple(missing))


def available() -> SandboxReport:
    """Return what :func:`enter` achieves on this machine, tried in a process of its own.

    Raises:
        OSError: that process could not be run.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-c", f"import {__name__} as s; print(s.enter(1 << 30).to_json())"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"the sandbox could not be tried: {error}") from error
    return SandboxReport.from_json(result.stdout)


def limit_cpu_time(seconds: float) -> None:
    """End this process after so many more seconds of processor time.

    The second line of defence, for when nobody is left who watches the clock.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # The limit has whole seconds only; one that is used up already would end the process at once.
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _limit_resources(memory_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        # The address space rather than resident memory, which has no limit that is enforced.
        (resource.RLIMIT_AS, address_space + memory_bytes),
    ):
        _, hard = resource.getrlimit(limit)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))


def _drop_capabilities() -> None:
    """Give up root's privileges, but for reading: an installation may belong to another user."""
    machine = platform.machine()
    if machine not in _CAPSET:
        raise OSError(f"no number of capset for {machine}")
    keep = _CAP_DAC_READ_SEARCH if os.geteuid() == 0 else 0
    # struct __user_cap_header: u32 version; int pid. Then effective, permitted and inheritable, of
    # the capabilities 0-31 and 32-63.
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = struct.pack("=6I", keep, keep, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_CAPSET[machine], header, data) != 0:
        # A container may have taken the one that is to be kept.
        data = struct.pack("=6I", 0, 0, 0, 0, 0, 0)
        if libc.syscall(_CAPSET[machine], header, data) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
