# SPDX-License-Identifier: Apache-2.0
"""What the log-probs of a rollout cost: engine tokens per second, bytes, and mask decisions.

    python benchmarks/rollout_transport.py [--json PATH]    the table
    python benchmarks/rollout_transport.py --check          `name value target ok|short` lines
    python benchmarks/rollout_transport.py --decisions N    N synthetic tokens, every mask

Two models made from seeds: a Qwen3 of hidden size 64 with the real vocabulary of 151,936 tokens,
where all time goes into the head and the sampler, and a tiny Qwen3-MoE with 128 tokens, where it
goes into Python. The same requests take turns: ours with the top 20, ours with the sampled token
only, and the dict form as a client of plain vLLM would read it. Times are from the request to
arrays in the trainer's process, medians of interleaved rounds; processor time is given as well,
since it is nearly the same on a busy machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.environment import describe_environment
from benchmarks.targets import Target, as_json
from benchmarks.transport_decisions import (
    Count,
    Tokens,
    count_changes,
    pooled,
    recorded_tokens,
    synthetic_tokens,
)
from benchmarks.transport_naive import NaiveEngine
from megatron.rl.rollout.client.vllm_engine import VLLMEngine, VLLMEngineConfig
from megatron.rl.rollout.messages import sequences_message
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts
from tests.checkpoints import QWEN3, random_tensors, write_checkpoint
from tests.engine.tiny_model import build_model, save_checkpoint

VOCAB = 151_936
TOP_K = 20
# Logits of a standard deviation of about 6: the top 20 then hold most of the probability.
HEAD_SCALE = 5.0
LARGE = QWEN3 | {"vocab_size": VOCAB, "max_position_embeddings": 512, "torch_dtype": "float32"}
# Of the weights, for a policy that has moved away from the engine.
PERTURBATION = 0.03
ROUNDS = 4
CHECK_SYNTHETIC_TOKENS = 400_000
CHUNK_TOKENS = 20_000


@dataclass(frozen=True)
class Workload:
    """One model and what is asked of it."""

    name: str
    vocab_size: int
    make: Callable[[Path], Path]
    max_tokens: int
    # The recorded rollouts that mask decisions are measured on.
    recorded_samples: int
    recorded_tokens: int

    def request(self, top_logprobs: int, **changes: Any) -> GenerationRequest:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, self.vocab_size, (16, 8)).tolist()
        samples = changes.pop("samples", 4)
        settings = SamplingSettings(
            **{
                "max_tokens": self.max_tokens,
                "top_logprobs": top_logprobs,
                "seed": 1,
                **changes,
            }
        )
        return GenerationRequest.from_lists(prompts, samples, settings)


def make_large(folder: Path) -> Path:
    """A Qwen3 with the vocabulary of the real ones."""
    from safetensors.torch import save_file

    write_checkpoint(folder, LARGE)
    tensors = random_tensors(LARGE, seed=0)
    tensors["lm_head.weight"] *= HEAD_SCALE
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_tiny(folder: Path) -> Path:
    """The Qwen3-MoE of the tests."""
    return save_checkpoint(build_model(seed=0), folder)


WORKLOADS = (
    Workload("large_vocabulary", VOCAB, make_large, 24, recorded_samples=8, recorded_tokens=24),
    Workload("tiny", 128, make_tiny, 96, recorded_samples=96, recorded_tokens=128),
)


@dataclass(frozen=True)
class Times:
    """Of one answer, seconds."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Form:
    """One way to get rollouts, and the process that does most of the work."""

    run: Callable[[], Any]
    pid: int | None

    def cpu_s(self) -> float:
        """Processor seconds that process and this one have used, as far as this machine tells."""
        stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(stat[11]) + int(stat[12])  # user and system, proc(5)
        return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


@dataclass(frozen=True)
class Measured:
    """Speed by form, values that differ from plain vLLM's, bytes, and mask decisions by mask."""

    tokens_per_s: dict[str, float]
    cpu_us_per_token: dict[str, float]
    different: int
    bytes_per_token: float
    decisions: dict[str, Count]


def measure(workload: Workload, rounds: int) -> Measured:
    """Start both engines on the workload's model and let the forms take turns."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = workload.make(Path(scratch) / "model")
        config = VLLMEngineConfig(
            str(folder),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=64,
            top_logprobs=TOP_K,
            device="cpu",
            kv_cache_gib=0.2,
            threads=1,
        )
        naive = stack.enter_context(NaiveEngine(config))
        engine = stack.enter_context(VLLMEngine(config))
        engine.wait_ready()
        naive.wait_ready()
        top, sampled = workload.request(TOP_K), workload.request(0)
        forms = {
            "top20": Form(lambda: engine.generate(top), engine.pid),
            "sampled_only": Form(lambda: engine.generate(sampled), engine.pid),
            "dict": Form(lambda: naive.generate(top), naive.pid),
        }
        last, times = _take_turns(forms, rounds)
        tokens = last["top20"].num_tokens
        recorded = workload.request(
            TOP_K,
            samples=workload.recorded_samples,
            max_tokens=workload.recorded_tokens,
            topk_precision="float32",
        )
        rollouts = engine.generate(recorded)
        return Measured(
            {form: tokens / t.wall_s for form, t in times.items()},
            {form: t.cpu_s / tokens * 1e6 for form, t in times.items()},
            _count_different(engine.generate(replace_precision(top)), last["dict"]),
            bytes_per_token(last["top20"]),
            count_changes(_in_chunks(folder, recorded, rollouts)),
        )


def replace_precision(request: GenerationRequest) -> GenerationRequest:
    """The same request with the log-probs as the engine has them."""
    return replace(request, settings=replace(request.settings, topk_precision="float32"))


def _take_turns(forms: dict[str, Form], rounds: int) -> tuple[dict[str, Any], dict[str, Times]]:
    times: dict[str, list[Times]] = {name: [] for name in forms}
    last: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, form in forms.items():
            started, cpu_started = time.perf_counter(), form.cpu_s()
            last[name] = form.run()
            elapsed = Times(time.perf_counter() - started, form.cpu_s() - cpu_started)
            if number:  # the first warms up
                times[name].append(elapsed)
    medians = {
        name: Times(
            statistics.median(value.wall_s for value in values),
            statistics.median(value.cpu_s for value in values),
        )
        for name, values in times.items()
    }
    return last, medians


def _count_different(ours: Rollouts, naive: Any) -> int:
    """Tokens, sampled log-probs and top log-probs that are not bit for bit plain vLLM's."""
    if len(naive.response_tokens) != ours.num_tokens:
        return ours.num_tokens
    pairs = (
        (ours.response_tokens, naive.response_tokens),
        (ours.log_probs, naive.log_probs),
        (ours.topk.decode()[1], naive.topk_log_probs),
    )
    return sum(int((left != right).sum()) for left, right in pairs)


def bytes_per_token(rollouts: Rollouts) -> float:
    """Bytes of one frame with all sequences, per response token."""
    index = np.arange(rollouts.num_sequences, dtype=np.int64)
    arrays = sequences_message(1, FinishedSequences(index, rollouts)).arrays
    return sum(array.nbytes for array in arrays.values()) / rollouts.num_tokens


def _in_chunks(folder: Path, request: GenerationRequest, rollouts: Rollouts) -> Iterator[Tokens]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += PERTURBATION * parameter.std().clamp_min(0.1) * noise
    yield from recorded_tokens(model, request, rollouts, seed=2)


def targets(measured: dict[str, Measured], synthetic: dict[str, Count]) -> list[Target]:
    """The stated targets, from what was measured."""
    lines = []
    for name, result in measured.items():
        speed = result.tokens_per_s
        of_sampled, of_dict = (speed["top20"] / speed[form] for form in ("sampled_only", "dict"))
        if name == "large_vocabulary":
            lines.append(Target(f"{name}/top20_of_sampled_only", of_sampled, 0.90, at_least=True))
            lines.append(Target(f"{name}/bytes_per_token", result.bytes_per_token, 128))
        lines.append(Target(f"{name}/top20_of_dict_form", of_dict, 1.0, at_least=True))
        lines.append(Target(f"{name}/values_unlike_plain_vllm", result.different, 0))
        share = pooled(result.decisions).share
        lines.append(Target(f"{name}/mask_decisions_changed", share, 1e-4))
    share = pooled(synthetic).share
    lines.append(Target("synthetic/mask_decisions_changed", share, 1e-4))
    return lines


def synthetic_changes(count: int) -> dict[str, Count]:
    """Every mask over synthetic tokens."""
    return count_changes(synthetic_tokens(count, CHUNK_TOKENS, VOCAB, seed=0))


def print_table(measured: dict[str, Measured]) -> None:
    """One line a form, and what stands next to it."""
    for name, result in measured.items():
        base = result.tokens_per_s["sampled_only"]
        for form, speed in result.tokens_per_s.items():
            cpu = result.cpu_us_per_token[form]
            print(
                f"{name} {form}: {speed:.0f} tokens/s, {speed / base:.3f} of sampled_only; "
                f"{cpu:.0f} us of processor time a token"
            )
        print(f"{name}: {result.bytes_per_token:.1f} bytes a token")
        print_counts(name, result.decisions)


def print_counts(name: str, counts: dict[str, Count]) -> None:
    """One line a mask."""
    for mask, count in counts.items():
        print(f"{name} {mask}: {count.changed} of {count.outside} outside, {count.share:.1e}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="measure the stated targets only")
    parser.add_argument("--decisions", type=int, help="only mask decisions, of so many tokens")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"environment": describe_environment()}
    code = 0
    if options.decisions:
        synthetic = synthetic_changes(options.decisions)
        print_counts("synthetic", synthetic)
    else:
        measured = {workload.name: measure(workload, options.rounds) for workload in WORKLOADS}
        results["models"] = {name: dataclasses.asdict(m) for name, m in measured.items()}
        synthetic = synthetic_changes(CHECK_SYNTHETIC_TOKENS)
        if options.check:
            lines = targets(measured, synthetic)
            for target in lines:
                print(target.line())
            results["targets"] = as_json(lines)
            code = 0 if all(target.met for target in lines) else 1
        else:
            print_table(measured)
            print_counts("synthetic", synthetic)
    results["synthetic_decisions"] = {n: dataclasses.asdict(c) for n, c in synthetic.items()}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
