# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the loss path, from hidden states to the gradients of both factors.

    python benchmarks/loss_path.py [--json PATH]    the table
    python benchmarks/loss_path.py --check          the targets: `name value target ok|short`

Side by side in one run, so that the machine's speed cancels: the three bare matrix products that
any loss path needs (the floor); the plain float32 path (log-softmax of whole logits, top-K gather,
entropy, autograd), which is what public code of divergence masks does; the same path chunked and
compiled; cut-cross-entropy and Liger where they are installed and run here (plain cross-entropy:
they compute less); and ours, with a share p of rows that have a gradient. Times are medians of
interleaved repetitions. Peak memory is measured in processes of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import describe_environment
from benchmarks.targets import Target, as_json
from pdm import BehaviorSupport, PolicyLossConfig, VocabShard, fused_policy_loss
from tests.parallel.spawn import run_ranks

HIDDEN = 1024
VOCAB = 151_936
SCALE = 0.05  # of the head's weights: logits of a standard deviation of 1.6

PREDICTIVE = PolicyLossConfig(mask="divergence", direction="uniform", threshold=1e9)
# Nothing is vetoed by either: the comparison is of what the masks cost, not of what they skip.
CLIPPED = PolicyLossConfig(mask="ratio_clip", clip_low=1 - 1e-12, clip_high=1e9)


@dataclass(frozen=True)
class Problem:
    """One shape, its tensors made from a seed."""

    tokens: int = 512
    vocab: int = VOCAB
    top_k: int = 20
    dtype: torch.dtype = torch.float32
    share: float = 1.0

    def make(self) -> Inputs:
        generator = torch.Generator().manual_seed(self.tokens + self.vocab)
        hidden = torch.randn(self.tokens, HIDDEN, generator=generator)
        weight = SCALE * torch.randn(self.vocab, HIDDEN, generator=generator)
        ids = torch.randint(self.vocab, (self.tokens, self.top_k + 1), generator=generator)
        log_probs = torch.randn(ids.shape, generator=generator).log_softmax(-1) - 0.1
        support = BehaviorSupport.from_topk(
            ids[:, 1:], log_probs[:, 1:], ids[:, 0], log_probs[:, 0]
        )
        advantages = torch.randn(self.tokens, generator=generator)
        # Which rows have no gradient is scattered, as vetoes and equal rewards are.
        inactive = torch.randperm(self.tokens, generator=generator)
        advantages[inactive[: round(self.tokens * (1 - self.share))]] = 0.0
        return Inputs(hidden.to(self.dtype), weight.to(self.dtype), support, advantages)


@dataclass(frozen=True)
class Inputs:
    """Hidden states [T, H], the head [V, H], and what the rollout recorded."""

    hidden: Tensor
    weight: Tensor
    support: BehaviorSupport
    advantages: Tensor


def bare_products(inputs: Inputs) -> None:
    """Logits, hidden gradient, weight gradient; nothing in between."""
    hidden, weight = inputs.hidden.float(), inputs.weight.float()
    logits = hidden @ weight.T
    logits @ weight
    logits.T @ hidden


def bare_bf16_products(inputs: Inputs) -> None:
    """The same in bfloat16 throughout, logits rounded."""
    logits = inputs.hidden @ inputs.weight.T
    logits @ inputs.weight
    logits.T @ inputs.hidden


def plain_path(inputs: Inputs) -> None:
    """Whole float32 logits, log-softmax, gathers, entropy; gradients by autograd."""
    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    log_probs = (hidden.float() @ weight.float().T).log_softmax(-1)
    _reinforce(log_probs, inputs).backward()


def _reinforce(log_probs: Tensor, inputs: Inputs) -> Tensor:
    support = inputs.support
    sampled = log_probs.gather(1, support.sampled[:, None]).squeeze(1)
    with torch.no_grad():
        top = log_probs.gather(1, support.token_ids.clamp_min(0))
        tail = (1 - top.exp().sum(-1)).clamp_min(1e-8)
        mu = support.log_probs.exp()
        divergence = (mu * (support.log_probs - top)).nan_to_num().sum(-1) - tail.log()
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    ratio = torch.exp(sampled - support.sampled_log_probs)
    keep = (divergence < 1e9) & (entropy > -1)
    return -(keep * ratio * inputs.advantages).sum()


def compiled_path(inputs: Inputs, chunk: int = 128) -> None:
    """The plain path in chunks of rows, torch.compile'd, gradients chunk by chunk."""
    for start in range(0, len(inputs.hidden), chunk):
        rows = slice(start, start + chunk)
        part = Inputs(
            inputs.hidden[rows],
            inputs.weight,
            BehaviorSupport(
                inputs.support.token_ids[rows],
                inputs.support.log_probs[rows],
                inputs.support.sampled[rows],
            ),
            inputs.advantages[rows],
        )
        hidden, weight = (x.detach().requires_grad_() for x in (part.hidden, part.weight))
        _compiled_loss()(hidden, weight, part).backward()


@functools.cache
def _compiled_loss() -> Callable[..., Tensor]:
    def loss(hidden: Tensor, weight: Tensor, inputs: Inputs) -> Tensor:
        return _reinforce((hidden.float() @ weight.float().T).log_softmax(-1), inputs)

    return torch.compile(loss)


def fused_path(inputs: Inputs, config: PolicyLossConfig = PREDICTIVE) -> None:
    """Ours."""
    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    fused = fused_policy_loss(hidden, weight, inputs.support, inputs.advantages, config)
    fused.result.loss.backward()


def cut_cross_entropy_path(inputs: Inputs) -> None:
    """Apple's cut-cross-entropy, the implementation that runs on this device."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    impl = "cce" if hidden.is_cuda else "torch_compile"
    linear_cross_entropy(hidden, weight, inputs.support.sampled, impl=impl).backward()


def liger_path(inputs: Inputs) -> None:
    """Liger's fused linear cross-entropy; needs a GPU."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    LigerFusedLinearCrossEntropyLoss()(weight, hidden, inputs.support.sampled).backward()


def measure(paths: dict[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    """Return the median seconds of each path; all of them take turns, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    for repetition in range(repetitions + 1):
        for name, path in paths.items():
            _synchronize()
            start = time.perf_counter()
            path()
            _synchronize()
            if repetition:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_extra_bytes(path: Callable[[Inputs], None], problem: Problem) -> int:
    """Return the peak memory of a path beyond its inputs and two gradients, in a new process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak_in_process, args=(path, problem, sender))
    process.start()
    peak: int = receiver.recv()
    process.join()
    return peak


def _peak_in_process(path: Callable[[Inputs], None], problem: Problem, sender: Any) -> None:
    path(dataclasses.replace(problem, tokens=8, vocab=1000).make())  # libraries' own buffers
    inputs = problem.make()
    before = _memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (Linux, proc(5))
    path(inputs)
    gradients = sum(x.numel() * x.element_size() for x in (inputs.hidden, inputs.weight))
    sender.send(max(0, _memory_bytes("VmHWM") - before - gradients))


def _memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def check(repetitions: int) -> list[Target]:
    """Measure the stated targets: ratios within this run."""
    shares = {share: Problem(share=share).make() for share in (1.0, 0.5, 0.1)}
    full = shares[1.0]
    times = measure(
        {
            "bare": lambda: bare_products(full),
            "plain": lambda: plain_path(full),
            "clipped": lambda: fused_path(full, CLIPPED),
            **{f"p={p:g}": functools.partial(fused_path, inputs) for p, inputs in shares.items()},
        },
        repetitions,
    )
    bf16 = Problem(dtype=torch.bfloat16).make()
    times |= measure(
        {"bare_bf16": lambda: bare_products(bf16), "bf16": lambda: fused_path(bf16)}, repetitions
    )
    long = Problem(tokens=2048)
    memory = {
        "plain": peak_extra_bytes(plain_path, long),
        "fused": peak_extra_bytes(fused_path, long),
        "fused_512": peak_extra_bytes(fused_path, Problem()),
    }
    return [
        Target("time/bare_products_p1", times["p=1"] / times["bare"], 1.12),
        Target("time/bare_products_p0.5", times["p=0.5"] / times["bare"], 0.80),
        Target("time/bare_products_p0.1", times["p=0.1"] / times["bare"], 0.55),
        Target("time/plain_path_p1", times["p=1"] / times["plain"], 1.0),
        Target("time_bf16/bare_products_p1", times["bf16"] / times["bare_bf16"], 1.35),
        Target("time/clipped_loss", times["p=1"] / times["clipped"], 1.03),
        Target("memory/plain_path_T2048", memory["fused"] / memory["plain"], 0.10),
        Target("memory_T2048/T512", memory["fused"] / max(memory["fused_512"], 1), 1.10),
    ]


def time_in_shards(rank: int, world_size: int, problem: Problem, repetitions: int) -> float:
    """Return the median seconds of ours over vocabulary shards, one thread a rank."""
    inputs = problem.make()
    shard = VocabShard.for_rank(
        problem.vocab, problem.vocab, rank, world_size, torch.distributed.group.WORLD
    )
    hidden = inputs.hidden.detach().requires_grad_()
    weight = inputs.weight[shard.start : shard.stop].clone().requires_grad_()
    times = []
    for repetition in range(repetitions + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        fused = fused_policy_loss(
            hidden, weight, inputs.support, inputs.advantages, PREDICTIVE, shard=shard
        )
        fused.result.loss.backward()
        torch.distributed.all_reduce(hidden.grad)  # the layer's own reduction
        if repetition:
            times.append(time.perf_counter() - start)
        hidden.grad = weight.grad = None
    return statistics.median(times)


def shard_rows(repetitions: int) -> list[dict[str, Any]]:
    """Measure ours at tensor-parallel sizes 1 and 2; same problem, one thread a rank."""
    rows = []
    for world_size in (1, 2):
        problem = Problem()
        seconds = run_ranks(time_in_shards, world_size, problem, repetitions, timeout_s=600.0)
        rows.append({"tensor_parallel": world_size, "seconds": max(seconds)})
        columns = problem.top_k + 1
        print(
            f"TP={world_size}: fused {rows[-1]['seconds']:.2f} s, one all-gather a chunk of "
            f"{4 * (columns + 5)} bytes a token and rank",
            flush=True,
        )
    return rows


def table(repetitions: int, vocabs: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """Measure every path over shapes; one row each."""
    rows = []
    for vocab in vocabs:
        for tokens in lengths:
            for top_k in (0, 20, 64):
                shares = (1.0, 0.5, 0.1) if top_k == 20 else (1.0,)
                rows.append(_shape_row(Problem(tokens, vocab, top_k), shares, repetitions))
                print(_format(rows[-1]), flush=True)
    return rows


def _shape_row(problem: Problem, shares: Sequence[float], repetitions: int) -> dict[str, Any]:
    inputs = problem.make()
    paths: dict[str, Callable[[], None]] = {
        "bare": functools.partial(bare_products, inputs),
        "plain": functools.partial(plain_path, inputs),
    }
    for name, path in (
        ("compiled", compiled_path),
        ("cut_cross_entropy", cut_cross_entropy_path),
        ("liger", liger_path),
    ):
        if problem.top_k == 20 and _runs(path):
            paths[name] = functools.partial(path, inputs)
    for share in shares:
        part = dataclasses.replace(problem, share=share).make()
        paths[f"fused p={share:g}"] = functools.partial(fused_path, part)
    return {
        "tokens": problem.tokens,
        "vocab": problem.vocab,
        "top_k": problem.top_k,
        "seconds": measure(paths, repetitions),
        "peak_extra_bytes": {
            "plain": peak_extra_bytes(plain_path, problem),
            "fused": peak_extra_bytes(fused_path, problem),
        },
    }


def _runs(path: Callable[[Inputs], None]) -> bool:
    try:
        path(Problem(tokens=8, vocab=1000, top_k=4).make())
    except Exception:
        return False
    return True


def _format(row: dict[str, Any]) -> str:
    seconds = row["seconds"]
    ratios = "  ".join(f"{name} {value / seconds['bare']:.2f}" for name, value in seconds.items())
    shape = f"V={row['vocab']} T={row['tokens']} K={row['top_k']}"
    peaks = {name: value / 2**20 for name, value in row["peak_extra_bytes"].items()}
    memory = ", ".join(f"{name} {value:.0f} MiB" for name, value in peaks.items())
    return f"{shape}: bare {seconds['bare']:.2f} s; {ratios}; peak extra {memory}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="measure the stated targets only")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, VOCAB])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    options = parser.parse_args()
    environment = describe_environment()
    results: dict[str, Any] = {"environment": environment}
    code = 0
    if options.check:
        targets = check(options.repetitions)
        for target in targets:
            print(target.line())
        results["targets"] = as_json(targets)
        code = 0 if all(target.met for target in targets) else 1
    else:
        results["tensor_parallel"] = shard_rows(options.repetitions)
        results["rows"] = table(options.repetitions, options.vocab, options.tokens)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
