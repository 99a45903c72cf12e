# SPDX-License-Identifier: Apache-2.0
"""Many pairs of policies at once, random and adversarial, for statements about every pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pdm import BehaviorSupport


@dataclass(frozen=True, eq=False)
class Pairs:
    """Logits of both policies, float64 numbers that float32 can hold; a sampled token each."""

    behavior: Tensor  # [T, V]
    policy: Tensor  # [T, V]
    sampled: Tensor  # [T]
    k: int

    @property
    def log_mu(self) -> Tensor:
        return torch.log_softmax(self.behavior, dim=-1)

    @property
    def log_pi(self) -> Tensor:
        return torch.log_softmax(self.policy, dim=-1)

    def support(self, dtype: torch.dtype = torch.float64) -> BehaviorSupport:
        """What an engine reports that computes and stores in ``dtype``."""
        log_mu = torch.log_softmax(self.behavior.to(dtype), dim=-1)
        values, ids = log_mu.topk(self.k, dim=-1)
        own = log_mu.gather(-1, self.sampled.unsqueeze(-1)).squeeze(-1)
        return BehaviorSupport.from_topk(ids, values, self.sampled, own)


Logits = Callable[[torch.Generator, int, int, int], tuple[Tensor, Tensor]]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def _spread(lowest: float, highest: float) -> Logits:
    """Logits of every temperature between the two, the policy at every distance."""

    def draw(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
        scale = lowest * (highest / lowest) ** _uniform(generator, t, 1)
        distance = 10.0 ** (3.0 * _uniform(generator, t, 1) - 2.5)
        behavior = scale * _normal(generator, t, v)
        return behavior, behavior + distance * _normal(generator, t, v)

    return draw


def _peaked(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
    """One token holds all but 1e-1 ... 1e-14 of either policy, not always the same one."""
    behavior, policy = _normal(generator, t, v), _normal(generator, t, v)
    behavior[:, 0] += 5.0 + 27.0 * _uniform(generator, t)
    policy[:, 0] += 5.0 + 27.0 * _uniform(generator, t)
    policy[::4] = policy[::4].roll(1, dims=-1)
    return behavior, policy


def _zipf(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
    """Heavy tails p_i ~ rank^-s, s from 0.3 to 2, perturbed."""
    exponent = 0.3 + 1.7 * _uniform(generator, t, 1)
    behavior = -exponent * torch.arange(1, v + 1, dtype=torch.float64).log()
    return behavior, behavior + 10.0 ** (2.0 * _uniform(generator, t, 1) - 1.5) * _normal(
        generator, t, v
    )


def _disjoint(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
    """Each policy is nearly impossible where the other lives."""
    gap = 150.0 * _uniform(generator, t, 1).square()
    half = torch.arange(v) < v // 2
    behavior, policy = 2.0 * _normal(generator, t, v), 2.0 * _normal(generator, t, v)
    return torch.where(half, behavior, behavior - gap), torch.where(half, policy - gap, policy)


def _spike_on_the_next(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
    """The policy's whole tail sits on the likeliest unseen token, just below the top K.

    The bound by mu_bar is met with equality up to the rounding of that token's probability.
    """
    behavior, policy = _normal(generator, t, v), _normal(generator, t, v)
    behavior[:, :k] = 1.0 + 3.0 * _uniform(generator, t, k)
    lowest = behavior[:, :k].amin(dim=-1, keepdim=True)
    behavior[:, k:] = lowest - 20.0 * _uniform(generator, t, v - k)
    behavior[:, k] = lowest.squeeze(-1) - 1e-6 * _uniform(generator, t)
    policy[:, k] += 10.0 * _uniform(generator, t) + 2.0
    return behavior, policy


def _one_unseen_token(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
    """Both tails are one and the same token: the bound by the tail masses is met."""
    behavior, policy = _normal(generator, t, v), _normal(generator, t, v)
    behavior[:, k + 1 :] -= 60.0
    policy[:, k + 1 :] -= 60.0
    policy[:, k] += 6.0 * _uniform(generator, t)
    return behavior, policy


def _flat_tail(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
    """Both tails are flat and alike: the bound of Cauchy and Schwarz is met."""
    behavior, policy = _normal(generator, t, v), _normal(generator, t, v)
    behavior[:, k:] = behavior[:, :k].amin(dim=-1, keepdim=True) - 1e-6
    policy[:, k:] = 3.0 * _normal(generator, t, 1)
    return behavior, policy


def _nearly_equal(generator: torch.Generator, t: int, v: int, k: int) -> tuple[Tensor, Tensor]:
    scale = 6.0 * _uniform(generator, t, 1)
    behavior = scale * _normal(generator, t, v)
    distance = 10.0 ** (-9.0 * _uniform(generator, t, 1) - 1.0)
    return behavior, behavior + distance * _normal(generator, t, v)


REGIMES: dict[str, Logits] = {
    "flat": _spread(1e-3, 0.5),
    "spread": _spread(0.5, 8.0),
    "peaked": _peaked,
    "heavy_tail": _zipf,
    "disjoint": _disjoint,
    "spike_on_the_next": _spike_on_the_next,
    "one_unseen_token": _one_unseen_token,
    "flat_tail": _flat_tail,
    "nearly_equal": _nearly_equal,
}
TOPK = (1, 2, 3, 5, 8, 20, 64)


def draw(regime: str, seed: int, tokens: int, vocab: int, k: int) -> Pairs:
    """A third of the tokens sampled from mu, a third from pi, a third from anywhere."""
    generator = torch.Generator().manual_seed(seed)
    inside = min(k, vocab - 1)  # the adversarial ones name the first unseen token
    logits = (x.float().double() for x in REGIMES[regime](generator, tokens, vocab, inside))
    behavior, policy = logits
    by_mu = torch.multinomial(torch.softmax(behavior, dim=-1), 1, generator=generator).squeeze(-1)
    by_pi = torch.multinomial(torch.softmax(policy, dim=-1), 1, generator=generator).squeeze(-1)
    anywhere = torch.randint(vocab, (tokens,), generator=generator)
    kind = torch.arange(tokens) % 3
    sampled = torch.where(kind == 0, by_mu, torch.where(kind == 1, by_pi, anywhere))
    return Pairs(behavior, policy, sampled, k)


def batches(total: int, first_seed: int = 0) -> Iterator[tuple[str, Pairs]]:
    """At least ``total`` pairs: every regime with every K, and 40 tokens more than that."""
    cases = [(regime, k) for regime in REGIMES for k in TOPK]
    tokens = -(-total // len(cases))
    for number, (regime, k) in enumerate(cases):
        yield f"{regime}, K={k}", draw(regime, first_seed + number, tokens, k + 40, k)
