# SPDX-License-Identifier: Apache-2.0
"""Questions put to an interpreter in a process of its own, each with a limit of time.

A broken CUDA driver or a package that does not import can hang or end the process that asks.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# A first import from a cold network disk, or on a busy machine, takes minutes.
TIMEOUT_S = 300.0

# Each prints one JSON object as its last line. Standard library alone, but for what it asks about.
VERSIONS = """
import importlib.metadata, json, platform, sys
found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
try:
    pins = importlib.metadata.requires("megatron-pdm") or []
except importlib.metadata.PackageNotFoundError:
    pins = []
print(json.dumps({"python": platform.python_version(), "executable": sys.executable,
                  "versions": found, "pins": pins}))
"""
TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "nccl": None}
has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
if has_nccl and torch.version.cuda:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
if torch.cuda.is_available():
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        found["gpus"].append({"name": gpu.name, "memory": gpu.total_memory,
                              "capability": [gpu.major, gpu.minor]})
print(json.dumps(found))
"""
MEGATRON = """
import json
from megatron.training import training
print(json.dumps({"has_rl_utils": training.has_rl_utils}))
"""
# argv: backend, rank, world size, file of the store.
COLLECTIVE = """
import datetime, json, sys, torch, torch.distributed as dist
backend, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size,
                        timeout=datetime.timedelta(seconds=30))
value = torch.full((1024,), float(rank + 1), device=device)
dist.all_reduce(value)
print(json.dumps({"sum": value.sum().item() / 1024}))
dist.destroy_process_group()
"""


class ProbeFailed(Exception):
    """An interpreter did not answer; says why in one line."""


def ask(
    question: str, *arguments: str, python: str | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Run a question in a fresh interpreter, in a folder where nothing lies.

    Args:
        python: its path; None: this one.

    Raises:
        ProbeFailed: it cannot be started, failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = subprocess.run(
                [python or sys.executable, "-W", "ignore", "-c", question, *arguments],
                cwd=folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise ProbeFailed(f"no answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise ProbeFailed(f"{python or sys.executable}: {error.strerror}") from None
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        words = [line for line in result.stderr.splitlines() if line.strip()]
        why = words[-1][:300] if words else f"exit code {result.returncode}"
        raise ProbeFailed(why)
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _environment() -> dict[str, str]:
    """This one's, without what torchrun sets for its ranks."""
    ours = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ours["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    return kept | ours


def store_file(folder: Path) -> str:
    """Return the path of a file through which ranks meet."""
    return str(folder / "store")
