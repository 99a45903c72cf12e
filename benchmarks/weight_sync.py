# SPDX-License-Identifier: Apache-2.0
"""How fast weights get ready for an engine, and how long an update of a large model would take.

    python benchmarks/weight_sync.py [--json PATH]    measured throughput, and the simulation
    python benchmarks/weight_sync.py --check          the targets: `name value target ok|short`

**Measured.** One rank with one layer of Qwen3-30B-A3B (128 experts of 768 x 2048) as a Megatron
model makes a plan, gathers by it and packs into the memory that an engine maps, in BF16 and in
block FP8: everything that happens on the trainer's side of an update. Bytes of the BF16 source per
second, as a share of one plain copy of as many bytes between buffers of which every page has been
touched, in the same run; medians of interleaved repetitions. One thread does either: a copy soon
has all of a machine's memory bandwidth, and two threads are only right on a machine with nothing
else to do.

**Simulated.** The plan gives the exact bytes that each rank sends to each owner of an engine (one
owner per engine, engines on the trainer's GPUs). With W bytes of BF16 weights, E bytes as the
engine gets them (FP8 data and scales, BF16 for the rest), n tensors, engines of g GPUs:

    move = max over ranks of (bytes out, bytes in between nodes / inter-node link,
                              bytes out, bytes in within the node / intra-node link)
    pack = W / pack rate                      (assembling, or quantising to FP8)
    load = E / g / load rate + n * seconds per tensor
    update = max(move, pack, load) + bucket / W * (the sum of the other two)

since buckets overlap: while one is loaded the next is packed and the one after that is on its way.
Links are full duplex and per GPU. Rates are inputs; their defaults are assumptions for an H100
node, none of them measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.environment import describe_environment
from benchmarks.targets import Target, as_json
from megatron.rl.model.architecture import Architecture, parse_architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.rollout.checkpoint_index import CheckpointIndex, TensorInfo
from megatron.rl.rollout.transfer.weight_format import WeightFormat
from megatron.rl.rollout.transfer.weight_packer import WeightPacker
from megatron.rl.rollout.transfer.weight_transport import SharedMemoryTransport
from megatron.rl.weights.engine_layout import BF16_BYTES, Quantization, engine_bytes
from megatron.rl.weights.gather import BUCKET_BYTES, gather_hf_tensors
from megatron.rl.weights.names import hf_shapes
from megatron.rl.weights.plan import WeightPlan, plan_weights
from megatron.rl.weights.routes import Routes
from tests.checkpoints import QWEN3_30B, QWEN3_235B

MEASURED = QWEN3_30B | {"num_hidden_layers": 1, "vocab_size": 8192}

# Shares of a plain copy, from the project's goals.
LEAST_SHARE: dict[Quantization, float] = {"none": 0.5, "block_fp8": 0.25}
NAMES: dict[Quantization, str] = {"none": "bf16", "block_fp8": "block_fp8"}
PUBLISHED_SECONDS = 7.0  # verl and slime, 30B-A3B in BF16 on 32 H100
GPUS_PER_NODE = 8
LARGEST_KEPT_BYTES = 31 << 20  # just below glibc's DEFAULT_MMAP_THRESHOLD_MAX


# ---- measured


def measure(repetitions: int, *, with_digests: bool) -> dict[str, Any]:
    """Measure copying and packing in both forms, in turns; packing with digests too if asked."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.rl.parallel import build_groups, join_ranks, leave_ranks

    layout = ParallelConfig()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "PDM_RL_STORE": f"{folder}/store"}
        join_ranks(layout, "gloo")
        build_groups(layout, seed=0)
        try:
            return _measure_alone(
                parse_architecture(MEASURED), layout, repetitions, with_digests=with_digests
            )
        finally:
            leave_ranks()


def _measure_alone(
    architecture: Architecture, layout: ParallelConfig, repetitions: int, *, with_digests: bool
) -> dict[str, Any]:
    from megatron.rl.model.build import BuildOptions, build_model

    # An allocation of this size, once freed, makes the C library keep memory instead of handing it
    # back after every operation; any process that trains has had one.
    torch.empty(LARGEST_KEPT_BYTES, dtype=torch.uint8).fill_(0)
    chunks = build_model(architecture, layout, BuildOptions(dtype=torch.bfloat16))
    for parameter in chunks[0].parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    source_bytes = sum(p.numel() * p.element_size() for p in chunks[0].parameters())
    runs: dict[str, Callable[[], object]] = {}
    transports = []
    forms: list[tuple[str, Quantization, bool]] = [(form, form, False) for form in LEAST_SHARE]
    if with_digests:
        forms.append(("none_digests", "none", True))
    for name, quantization, digests in forms:
        transports.append(SharedMemoryTransport())
        packer = _packer(architecture, transports[-1], quantization, digests)
        runs[name] = functools.partial(_pack_once, chunks, architecture, layout, packer)
    source = torch.ones(source_bytes // 2, dtype=torch.bfloat16)
    runs["copy"] = functools.partial(torch.zeros_like(source).copy_, source)
    # What PyTorch's own conversion takes, in a cache: the quantiser cannot be faster on this path.
    wide = torch.ones(1 << 18)
    cast = functools.partial(torch.empty_like(wide, dtype=torch.float8_e4m3fn).copy_, wide)
    casts = source_bytes // 2 // wide.numel()
    runs["cast_to_e4m3"] = lambda: [cast() for _ in range(casts)]
    seconds = _median_seconds(runs, repetitions)
    for transport in transports:
        transport.close()
    return {
        "source_bytes": source_bytes,
        "tensors": len(hf_shapes(architecture)),
        "seconds": seconds,
        "bytes_per_s": {name: source_bytes / value for name, value in seconds.items()},
        "share_of_copy": {
            name: seconds["copy"] / value for name, value in seconds.items() if name != "copy"
        },
    }


def _packer(
    architecture: Architecture,
    transport: SharedMemoryTransport,
    quantization: Quantization,
    digests: bool,
) -> WeightPacker:
    """Return what an engine's client keeps from one update to the next."""
    shapes = hf_shapes(architecture)
    infos = {name: TensorInfo("BF16", shape) for name, shape in shapes.items()}
    index = CheckpointIndex(infos, frozenset(), architecture.vocab_size)
    weight_format = WeightFormat("bfloat16", quantization)
    return WeightPacker(transport, index, weight_format, BUCKET_BYTES, digests)


def _pack_once(
    chunks: list[torch.nn.Module],
    architecture: Architecture,
    layout: ParallelConfig,
    packer: WeightPacker,
) -> None:
    """Do the trainer's side of one update, the plan included."""
    plan = plan_weights(architecture, layout, "local")
    packer.check_shapes({tensor.name: tensor.shape for tensor in plan.tensors})
    for _ in packer.pack(gather_hf_tensors(chunks, plan, allocate=packer.slot)):
        pass


def _median_seconds(runs: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Return each run's median; the runs take turns, after one that touches all memory."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repetition:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


# ---- simulated


@dataclass(frozen=True)
class Rates:
    """Inputs of the simulation, per GPU; see the formula in this file's docstring."""

    intra_node_gb_per_s: float = 300.0  # NVLink of an H100: 450 each way at its peak
    inter_node_gb_per_s: float = 40.0  # a 400 Gb/s adapter: 50 at its peak
    assemble_gb_per_s: float = 1000.0  # one read and one write of device memory
    quantise_gb_per_s: float = 500.0  # two reads and half a write, small kernels
    load_gb_per_s: float = 300.0  # the engine copies from a neighbour's memory
    us_per_tensor: float = 100.0  # the engine finds the parameter and calls its loader


@dataclass(frozen=True)
class Scenario:
    """A model on so many GPUs."""

    name: str
    architecture: Architecture
    layout: ParallelConfig
    engine_gpus: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of one update, and of its parts when nothing overlaps them."""

    model: str
    gpus: int
    quantization: Quantization
    bf16_bytes: int
    engine_bytes: int
    bytes_between_nodes: int
    move_s: float
    pack_s: float
    load_s: float
    update_s: float


def scenarios(gpus: int) -> list[Scenario]:
    """Return both models in layouts that such clusters train them in."""
    small = ParallelConfig(tensor=4, data=gpus // 4, expert=8)
    data = gpus // 32
    large = ParallelConfig(
        tensor=4,
        pipeline=8,
        data=data,
        expert=min(8, 4 * data),
        first_stage_layers=11,
        last_stage_layers=11,
    )
    return [
        Scenario("30B-A3B", parse_architecture(QWEN3_30B), small, engine_gpus=4),
        Scenario("235B-A22B", parse_architecture(QWEN3_235B), large, engine_gpus=8),
    ]


def simulate(scenario: Scenario, rates: Rates) -> list[Estimate]:
    """Estimate an update in BF16 and in block FP8."""
    scenario.layout.check(scenario.architecture)
    plan = plan_weights(scenario.architecture, scenario.layout, "transformer_engine")
    gpus = scenario.layout.world_size
    owners = range(0, gpus, scenario.engine_gpus)
    traffic = Routes(plan, owners, GPUS_PER_NODE).traffic()
    move_s = (
        max(
            _busiest_bytes(traffic.within_node) / rates.intra_node_gb_per_s,
            _busiest_bytes(traffic.between_nodes) / rates.inter_node_gb_per_s,
        )
        / 1e9
    )
    between = BF16_BYTES * sum(traffic.between_nodes.values())
    return [
        _estimate(scenario, plan, quantization, between, move_s, rates)
        for quantization in ("none", "block_fp8")
    ]


def _busiest_bytes(moved: dict[tuple[int, int], int]) -> int:
    """Return the most bytes that one GPU's link carries in one direction."""
    totals: dict[tuple[Literal["out", "in"], int], int] = {}
    for (source, destination), numel in moved.items():
        if source == destination:
            continue
        for key in (("out", source), ("in", destination)):
            totals[key] = totals.get(key, 0) + BF16_BYTES * numel  # type: ignore[index, arg-type]
    return max(totals.values(), default=0)


def _estimate(
    scenario: Scenario,
    plan: WeightPlan,
    quantization: Quantization,
    bytes_between_nodes: int,
    move_s: float,
    rates: Rates,
) -> Estimate:
    bf16_bytes = BF16_BYTES * sum(tensor.numel for tensor in plan.tensors)
    parts = [engine_bytes(t.name, t.shape, quantization) for t in plan.tensors]
    to_engine = sum(part.total for part in parts)
    tensors = len(parts) + sum(part.scales > 0 for part in parts)
    pack_rate = rates.assemble_gb_per_s if quantization == "none" else rates.quantise_gb_per_s
    pack_s = bf16_bytes / pack_rate / 1e9
    load_s = to_engine / scenario.engine_gpus / rates.load_gb_per_s / 1e9
    load_s += tensors * rates.us_per_tensor / 1e6
    longest = max(move_s, pack_s, load_s)
    first_bucket = BUCKET_BYTES / bf16_bytes * (move_s + pack_s + load_s - longest)
    return Estimate(
        model=scenario.name,
        gpus=scenario.layout.world_size,
        quantization=quantization,
        bf16_bytes=bf16_bytes,
        engine_bytes=to_engine,
        bytes_between_nodes=bytes_between_nodes,
        move_s=move_s,
        pack_s=pack_s,
        load_s=load_s,
        update_s=longest + first_bucket,
    )


def simulate_all(sizes: list[int], rates: Rates) -> list[Estimate]:
    """Simulate both models at every size, and print a line each."""
    estimates = []
    for gpus in sizes:
        for scenario in scenarios(gpus):
            for estimate in simulate(scenario, rates):
                estimates.append(estimate)
                print(_format(estimate), flush=True)
    return estimates


def _format(estimate: Estimate) -> str:
    published = (
        f" (published for BF16 on 32 H100: {PUBLISHED_SECONDS:g} s)"
        if (estimate.model, estimate.gpus, estimate.quantization) == ("30B-A3B", 32, "none")
        else ""
    )
    return (
        f"simulated {estimate.model} on {estimate.gpus} GPUs, {NAMES[estimate.quantization]}: "
        f"{estimate.update_s:.2f} s; move {estimate.move_s:.2f}, pack {estimate.pack_s:.2f}, "
        f"load {estimate.load_s:.2f}; "
        f"{estimate.engine_bytes / 1e9:.1f} GB to an engine, "
        f"{estimate.bytes_between_nodes / 1e9:.0f} GB between nodes in all{published}"
    )


# ---- command line


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="measure the stated targets only")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--repetitions", type=int, help="5 with --check, else 11")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2**n for n in range(5, 11)])
    for field in dataclasses.fields(Rates):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=float, default=field.default)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    rates = Rates(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Rates)})
    results: dict[str, Any] = {"environment": describe_environment()}
    measured = measure(
        options.repetitions or (5 if options.check else 11), with_digests=not options.check
    )
    results["measured"] = measured
    shares = measured["share_of_copy"]
    targets = [
        Target(f"{NAMES[form]}/copy", shares[form], least, at_least=True)
        for form, least in LEAST_SHARE.items()
    ]
    results["targets"] = as_json(targets)
    for target in targets:
        print(target.line(), flush=True)
    if not options.check:
        print(
            "  ".join(f"{k} {v / 1e9:.2f} GB/s" for k, v in measured["bytes_per_s"].items()),
            flush=True,
        )
    sizes = [min(options.gpus)] if options.check else options.gpus
    results["rates"] = dataclasses.asdict(rates)
    results["simulated"] = [dataclasses.asdict(e) for e in simulate_all(sizes, rates)]
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if not options.check or all(target.met for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
