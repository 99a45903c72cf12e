# SPDX-License-Identifier: Apache-2.0
"""Call a launch script in a checkout whose path has spaces, and read what it started."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "rl").glob("*.sh"))
SHOW_30B = "cuda\n32\nQwen3-30B-A3B-Base"
SHOW_CPU = "cpu\n2\nsome/model"
# What a test must not inherit from where it runs.
FOREIGN = ("SLURM_", "NNODES", "NODE_RANK", "MASTER_", "GPUS_PER_NODE", "MODEL", "DATA", "RUN",
            "CLUSTER", "MASK", "CONFIG", "SCALE", "PLAN", "PYTHON", "PDM_RL_", "SRUN_")  # fmt: skip


def make_checkout(root: Path) -> Path:
    """Lay the project out anew under `root`: scripts copied, code linked."""
    for folder in ("tools", "examples"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("megatron", "pdm", "pdm_rl", "requirements"):
        (root / folder).symlink_to(ROOT / folder)
    return root


@dataclass
class Launcher:
    """Calls scripts of a checkout, with a stub or with this Python."""

    checkout: Path
    folder: Path
    """Where the user is; also holds the stub's log."""
    show: str = SHOW_30B
    path: list[Path] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "stub.log"

    @property
    def stub(self) -> Path:
        stub = self.folder / "stub python"
        if not stub.exists():
            stub.write_text(f"#!{sys.executable}\n")
            with stub.open("a") as file:
                file.write((ROOT / "tests" / "e2e" / "launch_stub.py").read_text())
            stub.chmod(0o755)
        return stub

    def environment(self, **variables: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        inherited["PATH"] = os.pathsep.join([*map(str, self.path), os.environ["PATH"]])
        own = {"PYTHON": str(self.stub), "STUB_LOG": str(self.log), "STUB_SHOW": self.show}
        return inherited | own | variables

    def script(self, name: str) -> str:
        return str(self.checkout / "examples" / "rl" / name)

    def run(
        self, script: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", script, *arguments],
            env=self.environment(**variables),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", script, *arguments],
            env=self.environment(**variables),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def calls(self, command: str) -> list[dict[str, Any]]:
        """The calls of `pdm-rl COMMAND`, or of a module named instead."""
        return [note for note in self.notes() if command in note.get("what", ())[1:3]]

    def wait_for(self, key: str, count: int = 1, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.log.exists() and sum(key in note for note in self.notes()) >= count:
                return
            time.sleep(0.05)
        raise AssertionError(f"no {key} in time")
