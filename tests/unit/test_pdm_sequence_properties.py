# SPDX-License-Identifier: Apache-2.0
"""What holds for every batch of sequences: masks through their config, counts, accepted bounds."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdm import (
    PolicyLossConfig,
    SequenceMaskConfig,
    acceptance_by_length,
    accepted_error_bound,
    expand_to_tokens,
    policy_loss,
    policy_statistics,
    sequence_mask,
    topk_kl,
)
from tests.unit.pdm_pairs import draw

few = settings(max_examples=15, deadline=None, derandomize=True)
SEEDS = st.integers(0, 100_000)
CONFIGS = st.sampled_from(
    [
        SequenceMaskConfig("max", divergence="topk_kl", max_threshold=0.1),
        SequenceMaskConfig("average", divergence="topk_kl", average_threshold=0.03),
        SequenceMaskConfig("average", divergence="sampled", average_threshold=0.03),
        SequenceMaskConfig("ser", ratio_threshold=0.3),
        SequenceMaskConfig("ln_trm", ratio_threshold=0.3, kl_max=0.1),
    ]
)


def random_ids(seed: int, tokens: int, sequences: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(sequences, (tokens,), generator=generator)
    return ids, torch.rand(tokens, generator=generator) < 0.8


@few
@given(seed=SEEDS, sequences=st.integers(1, 6), config=CONFIGS)
def test_a_rejected_sequence_is_out_of_the_loss_and_in_the_count(
    seed: int, sequences: int, config: SequenceMaskConfig
) -> None:
    pairs = draw("spread", seed=seed, tokens=40, vocab=20, k=4)
    ids, trained = random_ids(seed, 40, sequences)
    support = pairs.support()
    stats = policy_statistics(pairs.policy, support)
    result = sequence_mask(
        config,
        ids,
        sequences,
        behavior_log_prob=support.sampled_log_probs,
        policy_log_prob=stats.log_prob,
        divergence=topk_kl(support, stats),
        trained=trained,
    )
    accepted = expand_to_tokens(result.accept, ids, trained=trained)
    assert torch.equal(accepted, result.accept[ids] | ~trained)

    counts = acceptance_by_length(result, (2, 8))
    assert counts.total.sum() == result.num_scored
    assert counts.accepted.sum() == result.num_accepted
    assert (counts.accepted <= counts.total).all()

    advantages = torch.ones(40, dtype=torch.float64)
    plain, masked = (
        policy_loss(stats, support, advantages, PolicyLossConfig(), trained=trained, accepted=some)
        for some in (None, accepted)
    )
    assert (masked.coefficient[~accepted] == 0).all()
    assert torch.equal(masked.coefficient[accepted], plain.coefficient[accepted])
    assert torch.equal(masked.mask.keep, plain.mask.keep)
    assert masked.num_tokens == plain.num_tokens == trained.sum()


@few
@given(tau=st.floats(0.0, 20.0), rate=st.floats(0.0, 1.0), width=st.floats(0.1, 10.0))
def test_accepted_bound_grows_with_what_is_accepted(tau: float, rate: float, width: float) -> None:
    bound = accepted_error_bound(tau, rejection_rate=rate, reward_range=(0.0, width)).item()
    assert 0.0 <= bound <= width * (math.exp(tau) - 1.0)
    assert bound <= accepted_error_bound(tau + 0.1, reward_range=(0.0, width)).item()
