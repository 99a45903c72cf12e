# SPDX-License-Identifier: Apache-2.0
"""What a scoring process may not do, tried in restricted processes and in a free one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.rl.rewards import sandbox
from megatron.rl.rewards.sandbox import SandboxReport

ROOT = Path(__file__).parents[2]
MEMORY_MIB = 256

# Tries everything in turn and prints what came of it: "allowed", or the type of the exception.
PROBE = """
import ctypes, errno, fcntl, json, os, resource, socket, subprocess, sys, threading
from megatron.rl.rewards import landlock, sandbox, seccomp_filter

mode, folder = sys.argv[1:]
def absent(*args, **kwargs):
    raise OSError(errno.ENOSYS, "taken away by the test")
if mode in ("no landlock", "neither"):
    landlock.restrict = absent
if mode in ("no seccomp", "neither"):
    seccomp_filter.install = absent
report = None if mode == "free" else json.loads(sandbox.enter(%d << 20).to_json())

existing, parent = folder + "/existing", os.getppid()
libc = ctypes.CDLL(None, use_errno=True)

def clone3():
    if libc.syscall(435, None, 0) < 0:
        raise OSError(ctypes.get_errno(), "clone3")

def fork():
    if os.fork() == 0:
        os._exit(0)

def write():
    with open(folder + "/new", "w") as file:
        file.write("x")

def thread():
    started = threading.Thread(target=int)
    started.start()
    started.join()

def memory(mib):
    def take():
        bytearray(mib << 20)
    return take

probes = {
    "tcp": lambda: socket.socket(socket.AF_INET).close(),
    "tcp6": lambda: socket.socket(socket.AF_INET6).close(),
    "unix": lambda: socket.socket(socket.AF_UNIX).close(),
    "write": write,
    "empty file": lambda: os.close(os.open(folder + "/empty", os.O_CREAT | os.O_WRONLY)),
    "overwrite": lambda: open(existing, "r+").close(),
    "truncate": lambda: os.truncate(existing, 1),
    "mkdir": lambda: os.mkdir(folder + "/made"),
    "rename": lambda: os.rename(existing, existing),
    "link": lambda: os.link(existing, folder + "/link"),
    "symlink": lambda: os.symlink("x", folder + "/symlink"),
    "unlink": lambda: os.unlink(folder + "/victim"),
    "chmod": lambda: os.chmod(existing, 0o600),
    "times": lambda: os.utime(existing),
    "memfd": lambda: os.close(os.memfd_create("x")),
    "fork": fork,
    "program": lambda: subprocess.run(["true"], check=True),
    "thread": thread,
    "signal parent": lambda: os.kill(parent, 0),
    "signal all": lambda: os.killpg(os.getpgid(parent), 0),
    "signal owner": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, parent),
    "parent's limits": lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
    "parent's memory": lambda: open(f"/proc/{parent}/mem", "rb").close(),
    "parent's priority": lambda: os.setpriority(os.PRIO_PROCESS, parent, 0),
    "much memory": memory(4 * %d),
    "some memory": memory(%d // 4),
    "read": lambda: open(existing).read(),
    "signal itself": lambda: os.kill(os.getpid(), 0),
    "null": lambda: open(os.devnull, "w").write("x"),
    "own limits": lambda: resource.prlimit(0, resource.RLIMIT_CORE),
    "flags": lambda: fcntl.fcntl(0, fcntl.F_GETFL),
}
found = {}
for name, probe in probes.items():
    try:
        probe()
        found[name] = "allowed"
    except BaseException as error:
        found[name] = type(error).__name__
try:
    clone3()
except OSError as error:
    found["clone3"] = errno.errorcode[error.errno]
print(json.dumps({"report": report, "found": found}))
""" % (MEMORY_MIB, MEMORY_MIB, MEMORY_MIB)  # noqa: UP031 - the text is full of braces

NETWORK = ("tcp", "tcp6", "unix")
FILES = ("write", "empty file", "overwrite")
NAMES = (
    "truncate", "mkdir", "rename", "link", "symlink", "unlink", "chmod", "times", "memfd",
)  # fmt: skip
PROCESSES = (
    "fork", "program", "signal parent", "signal all", "signal owner", "parent's limits",
    "parent's priority",
)  # fmt: skip
HARMLESS = ("read", "signal itself", "own limits", "flags", "some memory")


def probe(mode, folder):
    (folder / "existing").write_text("kept")
    (folder / "victim").write_text("")
    result = subprocess.run(
        [sys.executable, "-c", PROBE, mode, str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    return probe("free", tmp_path_factory.mktemp("free"))["found"]


@pytest.fixture(scope="module", params=["all", "no landlock"])
def restricted(request, tmp_path_factory):
    available = sandbox.available()
    if not available.system_calls:
        pytest.skip(f"no seccomp filter here: {available.missing}")
    folder = tmp_path_factory.mktemp("restricted")
    result = probe(request.param, folder)
    if request.param == "all" and available.files != "landlock":
        pytest.skip(f"no Landlock here: {available.missing}")
    return request.param, folder, result


def test_sandbox_refuses_what_reaches_beyond_the_process(free, restricted):
    _, folder, result = restricted
    for name in (*NETWORK, *FILES, *NAMES, *PROCESSES):
        assert free[name] == "allowed", name  # otherwise this would show nothing
        assert result["found"][name] == "PermissionError", name
    assert free["thread"] == "allowed" and result["found"]["thread"] == "RuntimeError"
    assert result["found"]["clone3"] == "ENOSYS"  # the C library then takes what is refused
    assert sorted(path.name for path in folder.iterdir()) == ["existing", "victim"]
    assert (folder / "existing").read_text() == "kept"


def test_sandbox_limits_memory_and_leaves_computing_alone(free, restricted):
    _, _, result = restricted
    assert free["much memory"] == "allowed" and result["found"]["much memory"] == "MemoryError"
    assert {name: result["found"][name] for name in HARMLESS} == dict.fromkeys(HARMLESS, "allowed")


def test_sandbox_says_what_is_in_force(restricted):
    mode, _, result = restricted
    report = SandboxReport.from_json(json.dumps(result["report"]))
    assert report.complete and report.capabilities
    assert report.files == ("landlock" if mode == "all" else "seccomp")
    if mode == "all":
        # Where what a file may not be opened for is decided by its path, /dev/null stays.
        assert result["found"]["null"] == "allowed" and report.missing == ()
        assert result["found"]["parent's memory"] == "PermissionError"
    else:
        assert report.missing == ("Landlock: taken away by the test",)
    assert SandboxReport.from_json(report.to_json()) == report


def test_sandbox_without_the_kernels_help_still_writes_nothing(tmp_path):
    result = probe("neither", tmp_path)
    report = SandboxReport.from_json(json.dumps(result["report"]))
    assert not report.complete and not report.system_calls and report.files == "size_limit"
    assert [text.split(":")[0] for text in report.missing] == ["Landlock", "seccomp"]
    assert result["found"]["write"] == "OSError" and result["found"]["much memory"] == "MemoryError"
    assert (tmp_path / "new").read_text() == ""


def test_sandbox_cpu_time_ends_a_process_that_nobody_watches():
    code = "from megatron.rl.rewards.sandbox import limit_cpu_time as f\nf(0.1)\nwhile True: pass"
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False
    )
    assert result.returncode == -24  # SIGXCPU
