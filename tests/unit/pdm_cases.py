# SPDX-License-Identifier: Apache-2.0
"""Inputs and plain float64 oracles for the tests of `pdm`; nothing here calls what is tested."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdm import BehaviorSupport, PolicyStatistics


@dataclass(frozen=True, eq=False)
class Case:
    """A pair of policies over a whole vocabulary, with the sampled tokens and the top K of mu."""

    logits: Tensor  # [T, V] float64, of the policy
    log_mu: Tensor  # [T, V] float64, of the behaviour
    sampled: Tensor  # [T]
    k: int

    @property
    def log_pi(self) -> Tensor:
        return torch.log_softmax(self.logits, dim=-1)

    @property
    def support(self) -> BehaviorSupport:
        values, ids = self.log_mu.topk(self.k, dim=-1)
        sampled_values = self.log_mu.gather(-1, self.sampled[:, None]).squeeze(-1)
        return BehaviorSupport.from_topk(ids, values, self.sampled, sampled_values)

    def kept_ids(self, token: int) -> list[int]:
        """The support of a token as a plain list of distinct ids."""
        top = self.log_mu[token].topk(self.k).indices.tolist()
        return sorted(set(top) | {int(self.sampled[token])})


def random_case(
    seed: int,
    tokens: int = 7,
    vocab: int = 60,
    k: int = 5,
    scale: float = 2.0,
    distance: float = 0.7,
) -> Case:
    """Draw a policy ``distance`` away from a behaviour whose logits spread over ``scale``."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)

    behavior = scale * normal()
    log_mu = torch.log_softmax(behavior, dim=-1)
    # Half from mu (mostly among the top K), half from anywhere (mostly not).
    drawn = torch.multinomial(log_mu.exp(), 1, generator=generator).squeeze(-1)
    anywhere = torch.randint(vocab, (tokens,), generator=generator)
    sampled = torch.where(torch.arange(tokens) % 2 == 0, drawn, anywhere)
    return Case(behavior + distance * normal(), log_mu, sampled, k)


def textbook_topk_kl(log_mu: Tensor, log_pi: Tensor, kept: list[int]) -> Tensor:
    """Eq. 5 for one token, [V] and [V], summed term by term."""
    tail = torch.ones(log_mu.shape[-1], dtype=torch.bool)
    tail[kept] = False
    head = (log_mu[kept].exp() * (log_mu[kept] - log_pi[kept])).sum()
    if not tail.any():
        return head
    log_mu_tail = torch.logsumexp(log_mu[tail], dim=-1)
    log_pi_tail = torch.logsumexp(log_pi[tail], dim=-1)
    return head + log_mu_tail.exp() * (log_mu_tail - log_pi_tail)


def full_kl(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """KL(mu || pi) over the whole vocabulary: [T]."""
    return (log_mu.exp() * (log_mu - log_pi)).sum(dim=-1)


def log1mexp(x: float) -> float:
    """log(1 - exp(x)) in float64 for x < 0."""
    return math.log(-math.expm1(x)) if x > -math.log(2) else math.log1p(-math.exp(x))


def sampled_only(
    behavior: list[float], policy: list[float], entropy: list[float] | None = None
) -> tuple[Tensor, PolicyStatistics, BehaviorSupport]:
    """Statistics of given log-probabilities of the sampled token, on the binary support."""
    log_prob = torch.tensor(policy, requires_grad=True)
    support = BehaviorSupport.from_sampled(
        torch.zeros(len(policy), dtype=torch.int64), torch.tensor(behavior)
    )
    fixed = log_prob.detach()
    stats = PolicyStatistics(
        log_prob=log_prob,
        support_log_probs=fixed.unsqueeze(-1),
        tail_prob=-torch.expm1(fixed),
        sum_square=fixed.exp().square(),
        tail_sum_square=torch.zeros_like(fixed),
        tail_max=torch.zeros_like(fixed),
        entropy=torch.tensor(entropy or [1.0] * len(policy), requires_grad=True),
        vocab_size=10,
    )
    return log_prob, stats, support
