# SPDX-License-Identifier: Apache-2.0
"""Storing the top-K log-probs compactly leaves the mask decisions as they were."""

from dataclasses import fields

import torch

from benchmarks.transport_decisions import Tokens, count_changes, pooled, synthetic_tokens

TOKENS, CHUNK, VOCAB_SIZE = 30_000, 10_000, 151_936


class InBfloat16(Tokens):
    """The same tokens, stored too coarsely."""

    def stored(self) -> Tokens:
        values = {field.name: getattr(self, field.name) for field in fields(Tokens)}
        return Tokens(**values | {"log_probs": self.log_probs.bfloat16().float()})


def test_at_most_one_decision_in_ten_thousand_tokens_outside_changes():
    counts = count_changes(synthetic_tokens(TOKENS, CHUNK, VOCAB_SIZE, seed=3))
    assert len(counts) == 18, "two divergences, five and four directions, two thresholds"
    assert min(count.outside for count in counts.values()) > 1000
    assert pooled(counts).share <= 1e-4


def test_coarser_numbers_would_be_noticed():
    chunks = (
        InBfloat16(**{field.name: getattr(tokens, field.name) for field in fields(Tokens)})
        for tokens in synthetic_tokens(CHUNK, CHUNK, VOCAB_SIZE, seed=3)
    )
    for name, count in count_changes(chunks).items():
        assert count.share > 1e-4, name


def test_synthetic_tokens_are_distributions():
    (tokens,) = synthetic_tokens(1000, 1000, VOCAB_SIZE, seed=0)
    support = tokens.support()
    policy = tokens.policy
    assert torch.allclose(
        policy.support_log_probs.exp().sum(1) + policy.tail_prob, torch.ones(1000), atol=1e-5
    )
    assert ((support.token_ids >= 0) == (policy.support_log_probs > -torch.inf)).all()
    assert (support.log_probs.exp().sum(1) <= 1 + 1e-5).all()
    assert (tokens.log_probs[:, 1:] <= tokens.log_probs[:, :-1]).all()
    outside = ~(tokens.ids == tokens.sampled[:, None]).any(1)
    assert 0 < outside.sum() < 200
    assert (tokens.sampled_log_probs[outside] <= tokens.log_probs[outside, -1]).all()
    assert (policy.tail_max <= policy.tail_prob).all()
    assert (policy.tail_sum_square <= policy.tail_prob * policy.tail_max + 1e-9).all()
