# SPDX-License-Identifier: Apache-2.0
"""The certificate's log-prob probe says the same on every rank, whatever the layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import QWEN3, write_checkpoint
from tests.parallel.policy_case import build_policy
from tests.parallel.spawn import run_ranks

LAYOUTS = [{"data": 2}, {"context": 2}, {"tensor": 2}, {"pipeline": 2}]
SEQUENCES, TOKENS = 3, 9
WRONG_BY = 0.5


def probe_in_layouts(
    rank: int, world_size: int, path: str, tokens: np.ndarray, right: list[np.ndarray]
) -> list[Any]:
    """Per layout, on each rank: the outcome for two right engines, a wrong one and a broken one."""
    from megatron.core import parallel_state

    from megatron.rl import cpu_backend

    cpu_backend.install()
    outcomes = []
    for layout in LAYOUTS:
        outcomes.append(_probe(rank, path, layout, tokens, right))
        parallel_state.destroy_model_parallel()
    return outcomes


def _probe(
    rank: int, path: str, layout: dict[str, int], tokens: np.ndarray, right: list[np.ndarray]
) -> Any:
    from megatron.rl.parallel import ParallelConfig
    from megatron.rl.weights.certificate import Probe
    from pdm import PolicyLossConfig

    policy = build_policy(path, layout, loss=PolicyLossConfig(), temperature=0.7)
    parallel = ParallelConfig(**layout)
    probe = Probe(policy, parallel, engines=2, sequences=SEQUENCES, tokens=TOKENS)
    assert np.array_equal(probe.sequences, tokens)
    wrong = [scores.copy() for scores in right]
    wrong[1][2] -= WRONG_BY
    broken = [scores.copy() for scores in right]
    broken[0][0] = np.nan
    # Rank 0 owns engine 0, rank 1 engine 1.
    return [
        probe.compare({rank: right if rank == 0 else second}) for second in (right, wrong, broken)
    ]


def oracle(path: str, sequences: np.ndarray) -> list[np.ndarray]:
    """Log-probs at temperature 1 of every token but the first, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    scores = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence).long()
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        scores.append(log_probs.gather(1, tokens[1:, None]).squeeze(1).float().numpy())
    return scores


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    from megatron.rl.weights.certificate import probe_tokens

    path = str(write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "dense", QWEN3))
    tokens = probe_tokens(SEQUENCES, TOKENS, QWEN3["vocab_size"])
    return run_ranks(probe_in_layouts, 2, path, tokens, oracle(path, tokens))


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_the_probe_finds_the_wrong_engine(outcomes: list[list[Any]], number: int) -> None:
    from megatron.rl.rollout.errors import WeightsMismatch
    from megatron.rl.weights.certificate import require_match

    per_engine = SEQUENCES * (TOKENS - 1)
    for right, wrong, broken in (rank[number] for rank in outcomes):
        assert right.tokens == 2 * per_engine
        assert right.max < 1e-5
        require_match(right, 1e-5, version=1)
        assert wrong.worst_engine == 1
        assert wrong.max == pytest.approx(WRONG_BY, abs=1e-5)
        assert wrong.mean == pytest.approx(WRONG_BY / per_engine, abs=1e-5)
        assert broken.worst_engine == 1 and np.isnan(broken.mean)
        for outcome in (wrong, broken):
            with pytest.raises(WeightsMismatch, match="engine 1 and the policy disagree"):
                require_match(outcome, 1e-3, version=1)
    assert repr(outcomes[0][number]) == repr(outcomes[1][number])
