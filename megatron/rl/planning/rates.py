# SPDX-License-Identifier: Apache-2.0
"""The hardware rates and assumptions that a plan's times rest on: all of them, with sources.

``pdm-rl plan --rates FILE`` replaces any of them: the file has the sections ``gpu`` and
``assumptions`` with the fields below.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rl.errors import UserError
from megatron.rl.plain_files import read_yaml


@dataclass(frozen=True)
class GPU:
    """Peak rates of one GPU, dense (no sparsity), per second; a link's rate is of one direction."""

    name: str
    memory_gib: float
    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    nvlink_bytes: float
    pcie_bytes: float = 64e9
    """PCIe 5.0 x16."""
    network_bytes: float = 50e9
    """400 Gbit/s for each GPU, as in DGX H100 (8 ConnectX-7 a node)."""


# Data sheets of the vendor: H100 SXM5 and H200 SXM (the tensor figures there are with sparsity and
# halved here; NVLink is given as the sum of both directions). The H20 has no public data sheet: its
# figures are those that system vendors print.
GPUS = {
    "h20": GPU("h20", 95.6, 148e12, 296e12, 4.0e12, 450e9),
    "h100": GPU("h100", 79.6, 989e12, 1979e12, 3.35e12, 450e9),
    "h200": GPU("h200", 140.4, 989e12, 1979e12, 4.8e12, 450e9),
}


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet says. Guesses, until a run on the hardware replaces them."""

    training_efficiency: float = 0.40
    """Share of the peak that BF16 matrix products of a training step reach; Megatron-LM reports 41
    to 47 % for dense models on H100, experts reach less."""
    fp8_efficiency: float = 0.30
    """The same for FP8, relative to its own, higher peak."""
    prefill_efficiency: float = 0.40
    decode_efficiency: float = 0.60
    """Share of the memory bandwidth that decoding reaches."""
    decode_step_s: float = 0.004
    """Launches, all-reduces and sampling in every decoding step, beside reading memory."""
    link_efficiency: float = 0.70
    """Share of a link's rate that collectives reach."""
    overlap: float = 0.0
    """Share of communication that hides behind computation."""
    expert_imbalance: float = 1.3
    """Token copies on the busiest expert-parallel rank, relative to the mean: no load balancing
    loss acts during RL."""
    prompt_tokens: int = 256
    """Mean prompt length, for traffic and time; memory is planned for the longest."""
    trainer_reserve_gib: float = 4.0
    """CUDA context, NCCL buffers, cuBLAS workspaces, and blocks that the allocator cannot use."""
    engine_reserve_gib: float = 4.0
    """CUDA context, CUDA graphs and the largest step's activations of a vLLM worker."""
    sleeping_engine_gib: float = 1.5
    """What a sleeping vLLM worker keeps: its context and graphs."""


@dataclass(frozen=True)
class Cluster:
    """The hardware that a plan is made for; ``memory_gib`` may differ from the GPU's own."""

    gpus: int
    gpus_per_node: int
    memory_gib: float
    gpu: GPU
    assumptions: Assumptions


def nearest_gpu(memory_gib: float) -> GPU:
    """Return the GPU of the table whose memory is nearest."""
    return min(GPUS.values(), key=lambda gpu: abs(gpu.memory_gib - memory_gib))


def read_rates(path: str | Path, gpu: GPU) -> tuple[GPU, Assumptions]:
    """Read a file of rates, laid over a GPU of the table.

    Raises:
        UserError: no such file, or a section or field that does not exist.
    """
    try:
        tree = read_yaml(Path(path)) or {}
    except UserError as error:
        raise UserError(f"--rates {error}") from None
    if not isinstance(tree, dict) or set(tree) - {"gpu", "assumptions"}:
        raise UserError(f"--rates {path}: expected the sections gpu and assumptions")
    return (
        _replaced(gpu, tree.get("gpu"), f"{path}: gpu"),
        _replaced(Assumptions(), tree.get("assumptions"), f"{path}: assumptions"),
    )


def _replaced[T: (GPU, Assumptions)](default: T, values: Any, where: str) -> T:
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"--rates {where}: expected fields with numbers, got {values!r}")
    known = [f.name for f in dataclasses.fields(default)]
    if unknown := [name for name in values if name not in known]:
        raise UserError(f"--rates {where}.{unknown[0]} is unknown; known: {', '.join(known)}")
    for name, value in values.items():
        if name == "name":
            continue
        try:
            values[name] = float(value)  # YAML 1.1 reads 4e12 as text
        except (TypeError, ValueError):
            raise UserError(f"--rates {where}.{name}: expected a number, got {value!r}") from None
        if values[name] < 0:
            raise UserError(f"--rates {where}.{name}: expected 0 or more, got {value!r}")
    return dataclasses.replace(default, **values)
