# SPDX-License-Identifier: Apache-2.0
"""Disk, memory, limits and ports of this machine."""

import os
import resource
import shutil
import socket
from pathlib import Path

from pdm_rl.doctor.finding import Finding, note_unless

GIB = 1 << 30
# NCCL and torch pass buffers between the processes of a node through it; Docker's default is 64 MB.
LEAST_SHM_BYTES = GIB
LEAST_OPEN_FILES = 4096
DEFAULT_PORT = 29500


def machine_findings(run_folder: Path, *, has_gpu: bool) -> list[Finding]:
    """Look at everything that needs no other process."""
    return [
        _disk(run_folder),
        _memory(),
        _shared_memory(Path("/dev/shm")),
        _open_files(),
        _locked_memory(has_gpu),
        port_finding(_wanted_port()),
    ]


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = Path(os.path.abspath(folder))
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _disk(run_folder: Path) -> Finding:
    place = nearest_folder(run_folder)
    usage = shutil.disk_usage(place)
    if not os.access(place, os.W_OK):
        return Finding("error", "disk", f"run folders go to {run_folder}: {place} is not writable")
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free for run folders, {place}"
    return note_unless(usage.free > 10 * GIB, "disk", text)


def _memory() -> Finding:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    text = f"{fields['MemAvailable'] / GIB:.1f} of {fields['MemTotal'] / GIB:.1f} GiB available"
    limit = Path("/sys/fs/cgroup/memory.max")
    stated = limit.read_text().strip() if limit.is_file() else "max"
    if stated.isdigit() and int(stated) < fields["MemTotal"]:
        text += f", this container may take {int(stated) / GIB:.1f} GiB"
    cores = len(os.sched_getaffinity(0))
    return Finding("ok", "memory", f"{text}; {cores} core{'s' if cores > 1 else ''}")


def _shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("note", str(folder), "there is none: NCCL between GPUs of a node needs it")
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < LEAST_SHM_BYTES:
        text += ": NCCL between GPUs of a node needs 1 GiB; start the container with --shm-size"
    return note_unless(usage.free >= LEAST_SHM_BYTES, str(folder), text)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} open files (ulimit -n)"
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        return Finding("note", "limits", f"{text}, raise it to {LEAST_OPEN_FILES}: {_limit(hard)} "
                       "would be allowed")  # fmt: skip
    return Finding("ok", "limits", text)


def _locked_memory(has_gpu: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = f"{_limit(soft)} of locked memory (ulimit -l)"
    if has_gpu and not unlimited:
        text += ": NCCL over InfiniBand needs it unlimited"
    return note_unless(unlimited or not has_gpu, "limits", text)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _wanted_port() -> int:
    text = os.environ.get("MASTER_PORT", "")
    return int(text) if text.isdigit() else DEFAULT_PORT


def port_finding(port: int) -> Finding:
    """Say whether torchrun's rank 0 could listen there."""
    if not 0 < port < 1 << 16:
        return Finding("note", "port", f"MASTER_PORT is {port}, expected 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError as error:
            text = f"{port} (MASTER_PORT) cannot be listened on: {error.strerror}; only torchrun "
            return Finding("note", "port", text + "uses it")
    return Finding("ok", "port", f"{port} (MASTER_PORT) is free; only torchrun uses it")
