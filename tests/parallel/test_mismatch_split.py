# SPDX-License-Identifier: Apache-2.0
"""The split of the mismatch over two optimizer steps, in several layouts, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import QWEN3, random_tensors, write_checkpoint
from tests.parallel.policy_case import TEMPERATURE, build_policy, make_sequences, packed
from tests.parallel.spawn import run_ranks

LAYOUTS = [{"data": 2}, {"context": 2}, {"tensor": 2}, {"pipeline": 2}]
MINIBATCHES = [[1, 2, 4, 7], [0, 3, 5, 6]]
LEARNING_RATE = 1e-3


def measure_steps(rank: int, world_size: int, path: str, layouts: list[dict[str, int]]) -> Any:
    """Per layout, on each rank: metrics of both steps, exact and default, and weights between."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.core import parallel_state

    results = []
    for layout in layouts:
        results.append(_measure_steps(path, layout))
        parallel_state.destroy_model_parallel()
    return results


def _measure_steps(path: str, layout: dict[str, int]) -> Any:
    from megatron.core import parallel_state

    from megatron.rl.metrics import gather_records
    from megatron.rl.mismatch import MismatchSplit
    from megatron.rl.parallel import ParallelConfig
    from megatron.rl.policy.model import is_last_stage

    parallel = ParallelConfig(**layout)
    policy = build_policy(path, layout, learning_rate=LEARNING_RATE, total_steps=2)
    sequences = make_sequences(policy.architecture.vocab_size)

    def micro_batches(members: np.ndarray, max_tokens: int) -> list[Any]:
        return packed(sequences, parallel, members=members, max_tokens=max_tokens)

    def gathered(records: list[Any]) -> Any:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return gather_records(records, group) if is_last_stage() else None

    # Other micro-batches than those of the steps: tokens are found again wherever they went.
    scored = gathered(policy.score(micro_batches(np.arange(len(sequences)), max_tokens=25)))
    splits = [MismatchSplit(0, scored), MismatchSplit(0)]
    metrics, between = [], {}
    for number, members in enumerate(MINIBATCHES):
        tokens = gathered(policy.train_step(micro_batches(np.array(members), 40)).records)
        if tokens is not None:
            metrics.append([split.measure(tokens) for split in splits])
        if number == 0:
            between = {name: tensor.clone() for name, tensor in policy.hf_tensors()}
    return metrics, between


def oracle_tokens(path: str, weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """log mu, log pi and the top-K KL of every token by transformers in float64 (Eq. 5)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    sequences = make_sequences(model.config.vocab_size)
    ids, log_mu_top = sequences.topk.decode(np.arange(len(sequences.response_tokens)))
    log_pi, divergence = [], []
    for b in range(len(sequences)):
        prompt = sequences.prompt_tokens[slice(*sequences.prompt_offsets[b : b + 2])]
        first, last = sequences.response_offsets[b : b + 2]
        response = sequences.response_tokens[first:last]
        inputs = torch.from_numpy(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            logits = model(inputs[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        for t, row in zip(range(first, last), logits.log_softmax(-1).numpy(), strict=True):
            token = int(sequences.response_tokens[t])
            mu = dict(zip(ids[t].tolist(), np.exp(log_mu_top[t].astype(np.float64)), strict=True))
            mu[token] = np.exp(np.float64(sequences.log_probs[t]))
            pi = {i: np.exp(row[i]) for i in mu}
            mu_tail, pi_tail = 1 - sum(mu.values()), 1 - sum(pi.values())
            kl = sum(mu[i] * np.log(mu[i] / pi[i]) for i in mu)
            divergence.append(kl + mu_tail * np.log(mu_tail / pi_tail))
            log_pi.append(row[token])
    return {
        "log_mu": sequences.log_probs.astype(np.float64),
        "log_pi": np.array(log_pi),
        "divergence": np.array(divergence),
        "sequence": np.repeat(np.arange(len(sequences)), sequences.response_lengths),
    }


def expected(before: np.ndarray, after: np.ndarray, divergence: np.ndarray) -> dict[str, float]:
    difference = np.abs(np.exp(after) - np.exp(before))
    return {
        "kl": np.mean(before - after),
        "k3": np.mean(np.exp(after - before) - 1 - (after - before)),
        "log_prob_max": np.abs(after - before).max(),
        "prob_mean": difference.mean(),
        "prob_max": difference.max(),
        "topk_kl": divergence.mean(),
        "topk_kl_max": divergence.max(),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "dense", QWEN3))


def test_split_of_two_steps(checkpoint: str) -> None:
    ranks = run_ranks(measure_steps, 2, checkpoint, LAYOUTS)
    sampled_by = oracle_tokens(checkpoint, random_tensors(QWEN3, seed=0))
    for number, layout in enumerate(LAYOUTS):
        # The last rank is on the last stage; the weights are on rank 0.
        (first, second), between = ranks[-1][number][0], ranks[0][number][1]
        stepped = oracle_tokens(checkpoint, between)
        for exact, policy, members in (
            (first[0], sampled_by, MINIBATCHES[0]),
            (second[0], stepped, MINIBATCHES[1]),
        ):
            mine = np.isin(policy["sequence"], members)
            log_mu, log_pi_0 = policy["log_mu"][mine], sampled_by["log_pi"][mine]
            log_pi, divergence = policy["log_pi"][mine], policy["divergence"][mine]
            divergence_0 = sampled_by["divergence"][mine]
            parts = {
                "total": expected(log_mu, log_pi, divergence),
                "engine": expected(log_mu, log_pi_0, divergence_0),
                "update": expected(log_pi_0, log_pi, divergence - divergence_0),
            }
            for part, values in parts.items():
                for name, value in values.items():
                    got = exact[f"mismatch/{part}/{name}"]
                    assert got == pytest.approx(value, rel=1e-4, abs=2e-5), (layout, part, name)
        assert parts["update"]["log_prob_max"] > 0.02, "the step must have moved the policy"
        # Without a pass of its own: exactly as far as the batch's first part stands for the rest.
        default, engine = second[1], first[1]["mismatch/engine/kl"]
        assert default["mismatch/engine/kl"] == engine == first[0]["mismatch/total/kl"]
        assert default["mismatch/update/kl"] == default["mismatch/total/kl"] - engine
