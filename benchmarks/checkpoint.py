# SPDX-License-Identifier: Apache-2.0
"""What checkpoints cost: seconds that training waits, bytes a second, host memory.

    python benchmarks/checkpoint.py [--json PATH] [--check] [--megabytes N]

A dense Qwen3 made from a seed, on gloo ranks on CPU. Synchronous and asynchronous saves take turns
in one run, so that both meet the same disk; between two of them the policy trains. Then, in fresh
processes: the memory that a rank takes to load a checkpoint, and to load a Hugging Face checkpoint
of ``--megabytes`` of weights under tensor parallelism 2, beyond what the model itself takes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.targets import Target, as_json

MIB = 1 << 20
# Async saves may hold up training for this share of a synchronous save.
MAX_BLOCKED_SHARE = 0.25
# Reading takes pieces of at most 64 MiB, and needs little on top of one.
MAX_READ_MIB = 256
HIDDEN = 1024


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    parser.add_argument("--megabytes", type=int, default=2048, help="of Hugging Face weights")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    from benchmarks.environment import describe_environment
    from tests.parallel.spawn import run_ranks

    results: dict[str, Any] = {"environment": describe_environment()}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        small = _write_model(root / "small", 100)
        args = (small, str(root / "run"), options.repetitions)
        results["save"] = run_ranks(_save_both_ways, 2, *args, timeout_s=1200.0)[0]
        loads = run_ranks(_load_checkpoint, 1, small, str(root / "run"), timeout_s=600.0)
        results["load"] = loads[0]
        large = _write_model(root / "large", options.megabytes)
        ranks = run_ranks(_load_hugging_face, 2, large, timeout_s=1200.0)
        results["hugging_face"] = {"file_mib": options.megabytes, "ranks": ranks}
    targets = _targets(results)
    results["targets"] = as_json(targets)
    for target in targets:
        print(target.line())
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(options.check and not all(target.met for target in targets))


def _targets(results: dict[str, Any]) -> list[Target]:
    save, load = results["save"], results["load"]
    return [
        Target("blocked_share_of_sync", save["blocked_share"], MAX_BLOCKED_SHARE),
        Target("load_extra_mib", load["extra_mib"], MAX_READ_MIB),
        *(
            Target(f"hugging_face_extra_mib_rank_{rank}", of_rank["extra_mib"], MAX_READ_MIB)
            for rank, of_rank in enumerate(results["hugging_face"]["ranks"])
        ),
    ]


def _write_model(folder: Path, megabytes: int) -> str:
    """A checkpoint with about so many MB of float32 weights, in layers that are all alike."""
    from safetensors.torch import save_file

    from tests.checkpoints import QWEN3, tensor_shapes

    config = QWEN3 | {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 4096,
    }
    layer_bytes = sum(
        4 * torch.Size(shape).numel()
        for name, shape in tensor_shapes(config).items()
        if ".layers.0." in name
    )
    config["num_hidden_layers"] = 2 * max(1, round(megabytes * 1e6 / layer_bytes / 2))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.full(shape, 0.01) for name, shape in tensor_shapes(config).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from megatron.rl import cpu_backend

    cpu_backend.install()


def _save_both_ways(
    rank: int, world_size: int, model: str, run: str, repetitions: int
) -> dict[str, Any]:
    _quiet()
    from tests.parallel.checkpoint_case import policy_in, run_state, train, writer_for

    policy = policy_in(model, {"data": world_size}, "bfloat16")
    writers = {
        "sync": writer_for(policy, f"{run}-sync", async_save=False),
        "async": writer_for(policy, run, async_save=True),
    }
    for writer in writers.values():
        writer.start()
        writer.save(run_state(1))
        writer.finish()  # the first one allocates
    reports: dict[str, list[Any]] = {name: [] for name in writers}
    steps: dict[str, list[float]] = {"alone": [], "while_writing": []}
    for number in range(repetitions):
        reports["sync"].append(writers["sync"].save(run_state(2 + number)))
        writers["async"].save(run_state(2 + number))
        report = None
        while report is None:
            started = time.perf_counter()
            train(policy, 1)
            steps["while_writing"].append(time.perf_counter() - started)
            report = writers["async"].collect()
        reports["async"].append(report)
        started = time.perf_counter()
        train(policy, 1)
        steps["alone"].append(time.perf_counter() - started)
    rows: dict[str, Any] = {}
    for name, done in reports.items():
        assert all(report.error is None for report in done), done
        rows[name] = {
            key: statistics.median(getattr(report, key) for report in done)
            for key in ("blocked_s", "write_s", "nbytes")
        }
    rows["blocked_share"] = rows["async"]["blocked_s"] / rows["sync"]["blocked_s"]
    rows["mb_per_s"] = rows["sync"]["nbytes"] / rows["sync"]["write_s"] / 1e6
    rows["step_s"] = {name: statistics.median(times) for name, times in steps.items() if times}
    return rows


def _load_checkpoint(rank: int, world_size: int, model: str, run: str) -> dict[str, float]:
    """Load in another layout than it was saved in."""
    _quiet()
    from megatron.rl.checkpoint.reader import find_newest
    from tests.parallel.checkpoint_case import policy_in

    policy = policy_in(model, {}, "bfloat16")
    # The optimizer's state is made when it is first needed: it is not loading that takes it.
    from megatron.rl.checkpoint.policy_shards import shards_to_load

    shards_to_load(policy)
    started = time.perf_counter()
    found = find_newest(Path(run))
    assert found is not None
    verified = time.perf_counter()
    with _PeakMemory() as memory:
        found.load_into(policy)
    return {
        "verify_s": verified - started,
        "load_s": time.perf_counter() - verified,
        "nbytes": found.manifest.nbytes,
        "extra_mib": memory.extra_mib,
    }


def _load_hugging_face(rank: int, world_size: int, model: str) -> dict[str, float]:
    _quiet()
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions, build_model, parameter_naming
    from megatron.rl.parallel import ParallelConfig, build_groups
    from megatron.rl.weights.load import load_hf_checkpoint
    from megatron.rl.weights.plan import plan_weights

    layout, architecture = ParallelConfig(tensor=world_size), read_architecture(model)
    build_groups(layout, seed=1)
    chunks = build_model(architecture, layout, BuildOptions())
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for parameter in parameters:
        parameter.data.zero_()  # its pages exist before the measurement
    plan = plan_weights(architecture, layout, parameter_naming())
    started = time.perf_counter()
    with _PeakMemory() as memory:
        load_hf_checkpoint(chunks, plan, model, rank=rank)
    return {
        "model_mib": sum(p.numel() * p.element_size() for p in parameters) / MIB,
        "load_s": time.perf_counter() - started,
        "extra_mib": memory.extra_mib,
        "mapped_mib": memory.mapped_mib,
    }


class _PeakMemory:
    """Private memory of this process beyond what it had, sampled from a thread.

    Pages of mapped files belong to the page cache, which the kernel takes back at will: what was
    touched of them is counted apart.
    """

    extra_mib = 0.0
    mapped_mib = 0.0

    def __enter__(self) -> _PeakMemory:
        self._end = threading.Event()
        self._before = self._peak = _memory()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self._peak = tuple(map(max, self._peak, _memory()))

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self.extra_mib, self.mapped_mib = (
            (peak - before) / MIB for peak, before in zip(self._peak, self._before, strict=True)
        )


def _memory() -> tuple[int, ...]:
    """Bytes of private memory, and of mapped files that the process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return sizes["RssAnon:"] * 1024, sizes["RssFile:"] * 1024


if __name__ == "__main__":
    sys.exit(main())
