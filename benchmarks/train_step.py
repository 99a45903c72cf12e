# SPDX-License-Identifier: Apache-2.0
"""Training tokens per second of packed against padded micro-batches, through Megatron's schedule.

    python benchmarks/train_step.py [--json PATH]

One rank on CPU, a Qwen3-MoE made from a seed, response lengths drawn from a log-normal distribution
with a long tail, as reasoning responses have it (DAPO: most are short, a few reach the limit). The
padded form lays the same sequences out as a batch of the longest one's length, and its head sees
every position, which is what trainers without packing do. The two take turns; medians, and their
ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.rl import cpu_backend

SEED = 0
VOCAB = 4096
PROMPT_TOKENS = 16
LIMIT_TOKENS = 512
# Log-normal: median 90 tokens, mean 125, about 1 in 100 at the limit.
LOG_LENGTH_MEAN, LOG_LENGTH_STD = 4.5, 0.8
SEQUENCES = 48
TOP_K = 20


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cpu_backend.install()
    from benchmarks.environment import describe_environment

    torch.set_num_threads(1)
    results = _measure(options.repetitions)
    results["environment"] = describe_environment()
    for name in ("packed", "padded"):
        row = results[name]
        print(f"{name}: {row['seconds']:.2f} s a step, {row['tokens_per_s']:.0f} tokens/s")
    print(f"packed / padded tokens per second: {results['ratio']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _measure(repetitions: int) -> dict[str, Any]:
    from megatron.rl.batch import MinibatchSize, pack
    from pdm import PolicyLossConfig

    loss = PolicyLossConfig()
    with tempfile.TemporaryDirectory() as folder:
        policy = _policy(folder, loss)
    sequences = _sequences()
    everyone = np.arange(len(sequences))
    # Micro-batches of sixteen in the order they came, as without sorting by length.
    packed = [
        pack(
            sequences,
            members,
            minibatch=MinibatchSize.of(sequences.response_lengths),
            loss=loss,
            pad_multiple=1,
            device=torch.device("cpu"),
        )
        for members in np.split(everyone, len(everyone) // 16)
    ]
    forms = {"packed": packed, "padded": [_padded(batch) for batch in packed]}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for repetition in range(repetitions + 1):
        for name, batches in forms.items():
            start = time.perf_counter()
            policy.train_step(batches)
            if repetition:
                times[name].append(time.perf_counter() - start)
    tokens = sum(batch.num_input_tokens for batch in packed)
    results: dict[str, Any] = {"tokens": tokens}
    for name, batches in forms.items():
        seconds = statistics.median(times[name])
        results[name] = {
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "input_tokens": sum(batch.num_input_tokens for batch in batches),
        }
    results["ratio"] = results["packed"]["tokens_per_s"] / results["padded"]["tokens_per_s"]
    return results


def _padded(batch: Any) -> Any:
    """Lay a packed micro-batch out with every sequence at the longest one's length."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from pdm import BehaviorSupport

    starts = batch.packing.cu_seqlens_q[:-1].long()
    lengths = batch.packing.cu_seqlens_q.diff().long()
    longest = int(lengths.max())
    count = len(lengths)
    row_of_token = torch.repeat_interleave(torch.arange(count), lengths)
    place = torch.arange(int(lengths.sum())) - starts[row_of_token] + row_of_token * longest
    ids = torch.zeros(1, count * longest, dtype=torch.int64)
    ids[0, place] = batch.input_ids[0]
    cu_seqlens = torch.arange(count + 1, dtype=torch.int32) * longest
    # Positions that predict nothing take a token's place, with an advantage of 0.
    token = torch.zeros(count * longest, dtype=torch.int64)
    token[place[batch.rows]] = torch.arange(len(batch.rows))
    real = torch.zeros(count * longest)
    real[place[batch.rows]] = 1.0
    support = BehaviorSupport(
        batch.support.token_ids[token],
        batch.support.log_probs[token],
        batch.support.sampled[token],
    )
    return dataclasses.replace(
        batch,
        input_ids=ids,
        position_ids=torch.arange(longest).repeat(count).unsqueeze(0),
        packing=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        rows=torch.arange(count * longest),
        support=support,
        advantages=batch.advantages[token] * real,
        weights=batch.weights[token] * real,
        sequence=batch.sequence[token],
        local_sequence=batch.local_sequence[token],
    )


def _sequences() -> Any:
    from megatron.rl.batch import Sequences
    from megatron.rl.rollout.topk_columns import TopKColumns

    rng = np.random.default_rng(SEED)
    drawn = rng.lognormal(LOG_LENGTH_MEAN, LOG_LENGTH_STD, SEQUENCES).astype(int)
    lengths = np.clip(drawn, 2, LIMIT_TOKENS)
    total = int(lengths.sum())
    topk_ids = np.argsort(rng.random((total, 64)), axis=-1)[:, :TOP_K].astype(np.int32)
    log_probs = np.log(rng.dirichlet(np.ones(TOP_K + 1), total))[:, :TOP_K].astype(np.float32)
    return Sequences(
        number=np.arange(SEQUENCES),
        prompt_tokens=rng.integers(0, VOCAB, SEQUENCES * PROMPT_TOKENS).astype(np.int32),
        prompt_offsets=np.arange(SEQUENCES + 1) * PROMPT_TOKENS,
        response_tokens=topk_ids[:, 0].copy(),
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        group=np.arange(SEQUENCES) // 8,
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
        log_probs=log_probs[:, 0].copy(),
        topk=TopKColumns.encode(topk_ids, log_probs, VOCAB),
        policy_versions=np.zeros(total, dtype=np.int32),
    )


def _policy(folder: str, loss: Any) -> Any:
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions
    from megatron.rl.parallel import ParallelConfig, build_groups, join_ranks
    from megatron.rl.policy.head import FusedHead
    from megatron.rl.policy.model import OptimizerSettings, Policy
    from tests.checkpoints import QWEN3_MOE, write_checkpoint

    config = QWEN3_MOE | {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "num_experts": 8,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": LIMIT_TOKENS + PROMPT_TOKENS,
    }
    path = str(write_checkpoint(Path(folder) / "model", config))
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "PDM_RL_STORE": str(Path(folder) / "store"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    layout = ParallelConfig()
    join_ranks(layout, "gloo")
    build_groups(layout, SEED)
    architecture = read_architecture(path)
    settings = OptimizerSettings(
        learning_rate=1e-5,
        min_learning_rate=0.0,
        warmup_steps=0,
        total_steps=1,
        schedule="constant",
        weight_decay=0.0,
        clip_grad=1.0,
        ddp={},
        optimizer={},
    )
    head = FusedHead(loss, VOCAB, 1.0)
    return Policy(architecture, layout, BuildOptions(), settings, head, path)


if __name__ == "__main__":
    sys.exit(main())
