# SPDX-License-Identifier: Apache-2.0
"""What docs/security.md claims: calls that are nowhere in the source, and what hostile files do."""

import ast
import os
import pickle
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.rl.checkpoint.manifest import DamagedCheckpoint
from megatron.rl.checkpoint.metadata_file import load_metadata
from megatron.rl.config import load_config
from megatron.rl.errors import UserError
from megatron.rl.rollout.client import worker_handle

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdm", "pdm_rl", "megatron/rl")

UNPICKLING = frozenset({"load", "loads", "Unpickler"})
# Files that may unpickle, and why that runs nobody else's code.
MAY_UNPICKLE = {
    "megatron/rl/checkpoint/metadata_file.py": "an unpickler that makes a few data classes only",
    "megatron/rl/rewards/scoring_server.py": "from the trainer, over a socket pair it inherited",
    "megatron/rl/rewards/scoring_worker.py": "from the trainer, over a pipe it inherited",
}
NEVER_IMPORTED = frozenset({"shelve", "marshal", "dill", "cloudpickle", "joblib", "pickle5"})
MAY_LISTEN = {
    "megatron/rl/rollout/client/worker_handle.py": "a Unix socket in a folder of the user alone",
    "pdm_rl/doctor/machine.py": "tries whether a port of the loopback interface is free",
}
SHELL_CALLS = frozenset(
    {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
)


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in the source: file, dotted name of what is called, the call."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


CALLS = list(calls())


def keyword(call: ast.Call, name: str) -> object:
    """The constant that a call gives under this name; None where it gives none."""
    for one in call.keywords:
        if one.arg == name:
            return one.value.value if isinstance(one.value, ast.Constant) else ...
    return None


def files_that(matches) -> set[str]:  # type: ignore[no-untyped-def]
    return {file for file, name, call in CALLS if matches(name, call)}


def test_the_source_was_found() -> None:
    assert len(CALLS) > 3000


def test_only_listed_files_unpickle() -> None:
    def unpickles(name: str, call: ast.Call) -> bool:
        module, _, function = name.rpartition(".")
        return (module == "pickle" and function in UNPICKLING) or name == "_IndexUnpickler"

    assert files_that(unpickles) == MAY_UNPICKLE.keys()


def test_torch_loads_weights_only() -> None:
    loads = [(file, call) for file, name, call in CALLS if name == "torch.load"]
    assert loads
    assert [file for file, call in loads if keyword(call, "weights_only") is not True] == []


def test_no_format_that_can_hold_code() -> None:
    def opens(name: str, call: ast.Call) -> bool:
        unsafe_yaml = name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load")
        return unsafe_yaml or keyword(call, "allow_pickle") not in (None, False)

    assert files_that(opens) == set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                found: set[str] = set()
                if isinstance(node, ast.Import):
                    found = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found = {(node.module or "").split(".")[0]}
                assert not found & NEVER_IMPORTED, path


def test_no_text_becomes_code_or_a_shell_command() -> None:
    def runs(name: str, call: ast.Call) -> bool:
        return name in SHELL_CALLS | {"eval", "exec"} or keyword(call, "shell") not in (None, False)

    assert files_that(runs) == set()


def test_scripts_never_put_values_into_a_command_text() -> None:
    scripts = [*ROOT.glob("tools/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / ".ci" / "run"]
    assert len(scripts) >= 5
    for path in scripts:
        for line in path.read_text().splitlines():
            assert not re.search(r"(^|[\s;&|])eval\s", line), (path, line)
            assert not re.search(r"(ba)?sh -c [\"$]", line), (path, line)


def test_models_and_tokenizers_are_local_and_bring_no_code() -> None:
    loads = [(file, call) for file, name, call in CALLS if name.endswith(".from_pretrained")]
    assert loads
    assert [file for file, call in loads if keyword(call, "local_files_only") is not True] == []
    remote = files_that(lambda name, call: keyword(call, "trust_remote_code") not in (None, False))
    assert remote == set()


def test_only_listed_files_listen() -> None:
    def listens(name: str, call: ast.Call) -> bool:
        servers = (".bind", "create_server", "HTTPServer", "TCPServer", "Listener", "TCPStore")
        return name.endswith(servers)

    assert files_that(listens) == MAY_LISTEN.keys()


def test_the_engines_socket_is_the_users_alone() -> None:
    folder = worker_handle._private_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    finally:
        folder.rmdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert worker_handle.peer_user(ours) == os.getuid()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_process_is_told_apart() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0pdm-rl-test-{os.getpid()}")  # no file, so that anyone may connect
        listener.listen()
        if (child := os.fork()) == 0:
            try:
                os.setuid(65534)
                other = socket.socket(socket.AF_UNIX)
                other.connect(listener.getsockname())
                other.recv(1)
            finally:
                os._exit(0)
        connection, _ = listener.accept()
        with connection:
            assert worker_handle.peer_user(connection) == 65534
        os.waitpid(child, 0)


class RunsCode:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.mkdir, (str(self._path),)


def test_the_index_of_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "made")))
    with pytest.raises(DamagedCheckpoint, match=r"posix\.mkdir has no place in it"):
        load_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "made").exists()


def test_a_config_runs_no_code(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"run: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(UserError, match="could not determine a constructor for the tag"):
        load_config(config)
    assert not (tmp_path / "made").exists()
