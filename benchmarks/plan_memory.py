# SPDX-License-Identifier: Apache-2.0
"""Bytes of a training step, part by part: what ``pdm-rl plan`` predicts and what is allocated.

    python benchmarks/plan_memory.py [--case NAME] [--json PATH]

A real policy of about 57 million parameters (float32, Megatron's local modules, CPU) takes two
optimizer steps on full-length sequences; the second one is measured. Weights, gradients and
optimizer are the tensors themselves, counted by storage. Activations and head come from a record of
every tensor storage that is made and freed during the step: activations are what is alive when the
head is called, head the most that it has alive itself. The peak of both is also read from PyTorch's
profiler, whose hook is in the CPU allocator and sees the scratch memory of operators too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.checkpoints import QWEN3, QWEN3_MOE, write_checkpoint
from tests.parallel.spawn import run_ranks

TOP_K = 20
LENGTH = 256
PROMPT = 64
FULL_RECOMPUTATION = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": LENGTH,
}
DENSE = QWEN3 | SIZES
MOE = QWEN3_MOE | SIZES | {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256}


@dataclass(frozen=True)
class Case:
    """A model, a layout and the tokens of the one micro-batch."""

    model: dict[str, Any]
    layout: dict[str, int] = field(default_factory=dict)
    transformer: dict[str, Any] = field(default_factory=dict)
    head: str = "fused"
    tokens: int = 2048

    @property
    def ranks(self) -> int:
        return self.layout.get("tensor", 1) * self.layout.get("data", 1)


CASES = {
    "dense": Case(DENSE),
    "dense, TP 2": Case(DENSE, {"tensor": 2}),
    "dense, TP 2, full recomputation": Case(DENSE, {"tensor": 2}, FULL_RECOMPUTATION),
    "dense, DP 2": Case(DENSE, {"data": 2}),
    "experts": Case(MOE),
    "experts, TP 2, EP 2": Case(MOE, {"tensor": 2, "expert": 2}),
    "dense, reference head": Case(DENSE, head="reference"),
}


class StorageRecord(TorchDispatchMode):
    """Keeps count of the bytes of storages that operators make, until they are freed.

    Each belongs to the owner that is set when it is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owner = "activations"
        self.alive: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._add(storage, storage.nbytes(), self.owner)
        return out

    def _add(self, storage: torch.UntypedStorage, size: int, owner: str) -> None:
        key = storage._cdata
        self._known[key] = weakref.finalize(storage, self._remove, key, size, owner)
        self.alive[owner] = self.alive.get(owner, 0) + size
        self.peak[owner] = max(self.peak.get(owner, 0), self.alive[owner])

    def _remove(self, key: int, size: int, owner: str) -> None:
        del self._known[key]
        self.alive[owner] -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def measure_case(name: str) -> list[dict[str, dict[str, int]]]:
    """Run a case; return predicted and measured bytes by part, a pair of dicts for each rank."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "model", case.model)
        return run_ranks(_measure, case.ranks, case, str(path), timeout_s=600.0)


def _measure(rank: int, world_size: int, case: Case, path: str) -> dict[str, dict[str, int]]:
    from megatron.rl import cpu_backend

    cpu_backend.install()
    warnings.filterwarnings("ignore")
    from megatron.rl.policy.head import ReferenceHead
    from tests.parallel.policy_case import build_policy

    policy = build_policy(path, case.layout, temperature=1.0, transformer=case.transformer)
    if case.head == "reference":
        policy.head = ReferenceHead(policy.head.loss, policy.architecture.vocab_size, 1.0)
    batch = _micro_batch(policy, case)
    policy.train_step([batch])  # makes the optimizer's state
    measured = _persistent_bytes(policy) | _step_bytes(policy, batch)
    return {"predicted": _predict(policy, case, batch, path), "measured": measured}


def _micro_batch(policy: Any, case: Case) -> Any:
    """Pack sequences of equal length; this rank's share of them."""
    from megatron.rl.batch import MinibatchSize, Sequences, pack
    from megatron.rl.rollout.topk_columns import TopKColumns

    rng = np.random.default_rng(0)
    vocab, count = policy.architecture.vocab_size, case.tokens // LENGTH
    responses = LENGTH + 1 - PROMPT
    total = count * responses
    ids = np.argsort(rng.random((total, 64)), axis=-1)[:, :TOP_K]
    sequences = Sequences(
        number=np.arange(count),
        prompt_tokens=rng.integers(0, vocab, count * PROMPT).astype(np.int32),
        prompt_offsets=np.arange(count + 1) * PROMPT,
        response_tokens=rng.integers(0, vocab, total).astype(np.int32),
        response_offsets=np.arange(count + 1) * responses,
        group=np.arange(count) // 2,
        advantages=rng.normal(size=count).astype(np.float32),
        log_probs=np.full(total, -5.0, np.float32),
        topk=TopKColumns.encode(ids, np.full((total, TOP_K), -4.0), vocab, "float32"),
        policy_versions=np.zeros(total, dtype=np.int32),
    )
    return pack(
        sequences,
        np.arange(count),
        minibatch=MinibatchSize.of(sequences.response_lengths),
        loss=policy.head.loss,
        pad_multiple=case.layout.get("tensor", 1),
        device=torch.device("cpu"),
    )


def _persistent_bytes(policy: Any) -> dict[str, int]:
    """Bytes of the storages that stay between steps."""
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes()
               for chunk in policy.chunks for p in chunk.parameters()}  # fmt: skip
    gradients = {
        buffer.grad_data.untyped_storage()._cdata: buffer.grad_data.untyped_storage().nbytes()
        for chunk in policy.chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    }
    optimizer: dict[int, int] = {}
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        groups = [group["params"] for group in part.optimizer.param_groups]
        tensors = _tensors(list(part.optimizer.state.values())) + _tensors(groups)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                optimizer[storage._cdata] = storage.nbytes()
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return {name: sum(storages.values()) for name, storages in parts.items()}


def _step_bytes(policy: Any, batch: Any) -> dict[str, int]:
    """Bytes that a step makes: by storages, and the peak by the allocator."""
    head, record, entered = policy.head, StorageRecord(), []

    def observed(**arguments: Any) -> Any:
        entered.append(record.alive["activations"])
        record.owner = "head"
        try:
            return head(**arguments)
        finally:
            record.owner = "activations"

    def forward_backward() -> None:
        from megatron.rl.policy.step import forward_backward

        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        forward_backward(policy.chunks, policy.head, [batch])

    policy.head = observed
    with record:
        forward_backward()
    policy.head = head
    return {
        "activations": entered[0],
        "head": record.peak["head"],
        "step peak": _allocator_peak(forward_backward),
    }


def _allocator_peak(step: Callable[[], None]) -> int:
    """Most bytes that a step has allocated at once, as the CPU allocator's hook reports them."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def _predict(policy: Any, case: Case, batch: Any, path: str) -> dict[str, int]:
    from megatron.rl.config import parse_config
    from megatron.rl.planning.training_memory import (
        Workload,
        policy_head_bytes,
        training_bytes,
    )

    config = parse_config(
        {
            "run": {"device": "cpu"},
            "model": {"path": path, "dtype": "float32"},
            "task": {"name": "measured"},
            "parallel": case.layout,
            "rollout": {"top_logprobs": TOP_K},
            "policy": {"head": case.head},
            "megatron": {"transformer": case.transformer},
        }
    )
    tokens = batch.num_input_tokens
    workload = Workload(tokens, len(batch.rows), micro_batches=1, step_tokens=tokens)
    parts = training_bytes(config, policy.architecture, 0, workload, imbalance=1.0)
    return {
        "weights": parts.weights,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": parts.activations,
        "head": policy_head_bytes(config, policy.architecture, workload).peak,
        "step peak": parts.activations + parts.head + parts.working,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    options = parser.parse_args(arguments)
    results = {}
    for name in options.case or CASES:
        results[name] = measure_case(name)
        print(f"{name} (rank 0, MB)")
        predicted, measured = results[name][0]["predicted"], results[name][0]["measured"]
        for part, size in measured.items():
            print(
                f"  {part:12} predicted {predicted[part] / 1e6:>9.1f}  measured {size / 1e6:>9.1f}"
                f"  {predicted[part] / size - 1:>+7.1%}"
            )
    if options.json:
        from benchmarks.environment import describe_environment

        cases = {name: asdict(CASES[name]) for name in results}
        report = {"results": results, "cases": cases, "environment": describe_environment()}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
