# SPDX-License-Identifier: Apache-2.0
"""The functions that never form logits agree with those that do, whatever the sizes."""

from typing import Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdm import (
    BehaviorSupport,
    PolicyLossConfig,
    SequenceMaskConfig,
    accept_sequences,
    fused_policy_loss,
    linear_policy_statistics,
    policy_loss,
    policy_statistics,
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    tokens=st.integers(0, 12),
    vocab=st.integers(3, 40),
    chunk_size=st.integers(1, 13),
    temperature=st.floats(0.5, 2.0),
)
def test_linear_and_fused_agree_with_the_logits(
    seed: int, tokens: int, vocab: int, chunk_size: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_mu = torch.log_softmax(normal(tokens, vocab), dim=-1)
    values, ids = log_mu.topk(2, dim=-1)
    sampled = torch.randint(vocab, (tokens,), generator=generator)
    own = log_mu.gather(-1, sampled[:, None]).squeeze(-1)
    support = BehaviorSupport.from_topk(ids, values, sampled, own)
    advantages = normal(tokens)
    config = PolicyLossConfig(direction="certified", threshold=0.05)
    hidden, weight = normal(tokens, 5), normal(vocab, 5)
    plain = [x.clone().requires_grad_() for x in (hidden, weight)]
    fused = [x.clone().requires_grad_() for x in (hidden, weight)]

    stats = policy_statistics(plain[0] @ plain[1].T, support, temperature=temperature)
    expected = policy_loss(stats, support, advantages, config)
    expected.loss.backward()
    result = fused_policy_loss(
        *fused, support, advantages, config, temperature=temperature, chunk_size=chunk_size
    ).result
    result.loss.backward()

    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(result.loss, expected.loss, **close)
    assert torch.equal(result.mask.keep, expected.mask.keep)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **close)
    linear = linear_policy_statistics(
        hidden, weight, support, temperature=temperature, chunk_size=chunk_size
    )
    for name in ("log_prob", "tail_prob", "sum_square", "tail_max", "entropy"):
        torch.testing.assert_close(getattr(linear, name), getattr(stats, name).detach(), **close)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    tokens=st.integers(1, 20),
    threshold=st.floats(0.01, 3.0),
    divergence=st.sampled_from(["topk_kl", "topk_tv"]),
)
def test_a_sequence_is_accepted_exactly_if_its_largest_divergence_is_inside(
    seed: int, tokens: int, threshold: float, divergence: Literal["topk_kl", "topk_tv"]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_mu, log_pi = (
        torch.randn(tokens, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    values, ids = log_mu.topk(3, dim=-1)
    sampled = torch.randint(9, (tokens,), generator=generator)
    own = log_mu.gather(-1, sampled[:, None]).squeeze(-1)
    support = BehaviorSupport.from_topk(ids, values, sampled, own)
    sequence = torch.randint(4, (tokens,), generator=generator)
    config = SequenceMaskConfig("max", divergence=divergence, max_threshold=threshold)
    verdict = accept_sequences(config, policy_statistics(log_pi, support), support, sequence, 4)
    for number in range(4):
        largest = 0.0
        for t in (sequence == number).nonzero().flatten().tolist():
            seen = sorted({*ids[t].tolist(), int(sampled[t])})
            mu, pi = log_mu[t, seen].exp(), log_pi[t, seen].exp()
            mu, pi = (torch.cat([x, (1 - x.sum()).view(1)]) for x in (mu, pi))
            kl = float((mu * (mu / pi).log()).sum())
            tv = float((mu - pi).abs().sum()) / 2
            largest = max(largest, kl if divergence == "topk_kl" else tv)
        if abs(largest - threshold) > 1e-9:
            assert bool(verdict.accept[number]) == (largest <= threshold)
