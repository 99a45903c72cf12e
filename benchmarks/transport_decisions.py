# SPDX-License-Identifier: Apache-2.0
"""How many mask decisions change because the top-K log-probs are stored in fp24.

Every mask of the project is applied twice to the same tokens, with the log-probs as the engine had
them and as they are stored; what differs is counted per token outside the trust region.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from megatron.rl.rollout.protocol import GenerationRequest
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns
from pdm import (
    BehaviorSupport,
    PolicyLossConfig,
    PolicyStatistics,
    divergence_mask,
    policy_statistics,
)
from pdm.loss.decision import decide

THRESHOLDS = (0.05, 0.15)
TOKENS_AT_ONCE = 10_000
ID_STEP = 7919  # prime to any vocabulary size of interest
PAIRS = (
    *itertools.product(["topk_kl"], ["ratio", "aggregated", "uniform", "exact", "certified"]),
    *itertools.product(["topk_tv"], ["ratio", "aggregated", "uniform", "exact"]),
)


@dataclass(frozen=True)
class Tokens:
    """T tokens: what the engine said about them, and what the policy says now.

    ids int64 [T, K], log_probs float32 [T, K], sampled int64 [T], sampled_log_probs float32 [T]
    """

    ids: Tensor
    log_probs: Tensor
    sampled: Tensor
    sampled_log_probs: Tensor
    policy: PolicyStatistics
    advantages: Tensor

    def support(self) -> BehaviorSupport:
        return BehaviorSupport.from_topk(
            self.ids, self.log_probs, self.sampled, self.sampled_log_probs
        )

    def stored(self) -> Tokens:
        """The same with the log-probs that training would see."""
        columns = TopKColumns.encode(
            self.ids.numpy(), self.log_probs.numpy(), self.policy.vocab_size
        )
        ids, log_probs = columns.decode()
        return replace(
            self, ids=torch.from_numpy(ids).long(), log_probs=torch.from_numpy(log_probs)
        )


@dataclass
class Count:
    """Tokens of one mask."""

    outside: int = 0
    changed: int = 0

    @property
    def share(self) -> float:
        return self.changed / max(self.outside, 1)


def count_changes(chunks: Iterable[Tokens]) -> dict[str, Count]:
    """Compare every mask's keep flags over all chunks."""
    counts = {
        f"{divergence}/{direction}/{threshold:g}": Count()
        for divergence, direction in PAIRS
        for threshold in THRESHOLDS
    }
    for tokens in chunks:
        exact, stored = tokens.support(), tokens.stored().support()
        for divergence, direction in PAIRS:
            config = PolicyLossConfig(divergence=divergence, direction=direction)  # type: ignore[arg-type]
            before, after = (
                decide(config, tokens.policy, support, tokens.advantages)
                for support in (exact, stored)
            )
            for threshold in THRESHOLDS:
                masks = [
                    divergence_mask(tokens.advantages, d.divergence, d.direction, threshold)
                    for d in (before, after)
                ]
                count = counts[f"{divergence}/{direction}/{threshold:g}"]
                count.outside += int(masks[0].outside.sum())
                count.changed += int((masks[0].keep != masks[1].keep).sum())
    return counts


def pooled(counts: dict[str, Count]) -> Count:
    """All masks together: where few tokens are outside, one mask's share says little."""
    return Count(
        sum(count.outside for count in counts.values()),
        sum(count.changed for count in counts.values()),
    )


@torch.no_grad()
def recorded_tokens(
    model: torch.nn.Module, request: GenerationRequest, rollouts: Rollouts, seed: int
) -> Iterator[Tokens]:
    """Recorded rollouts in float32 form against `model`, some sequences at a time.

    model: a transformers model; its log-probs are those of the policy.
    """
    waiting: list[Tokens] = []
    for tokens in _recorded_sequences(model, request, rollouts, seed):
        waiting.append(tokens)
        if sum(len(part.sampled) for part in waiting) >= TOKENS_AT_ONCE:
            yield _join(waiting)
            waiting = []
    if waiting:
        yield _join(waiting)


def _join(parts: list[Tokens]) -> Tokens:
    """Field by field, the statistics included; the vocabulary is the same for all."""
    names = [field.name for field in fields(PolicyStatistics) if field.name != "vocab_size"]
    policy = PolicyStatistics(
        **{name: torch.cat([getattr(part.policy, name) for part in parts]) for name in names},
        vocab_size=parts[0].policy.vocab_size,
    )
    tensors = [field.name for field in fields(Tokens) if field.name != "policy"]
    return Tokens(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in tensors},
        policy=policy,
    )


def _recorded_sequences(
    model: torch.nn.Module, request: GenerationRequest, rollouts: Rollouts, seed: int
) -> Iterator[Tokens]:
    rng = np.random.default_rng(seed)
    all_ids, all_log_probs = rollouts.topk.decode()
    for index in range(rollouts.num_sequences):
        response = torch.from_numpy(rollouts.response(index)).long()
        prompt = torch.from_numpy(request.prompt(int(rollouts.prompt_index[index]))).long()
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows = slice(rollouts.response_offsets[index], rollouts.response_offsets[index + 1])
        ids = torch.from_numpy(all_ids[rows]).long()
        log_probs = torch.from_numpy(all_log_probs[rows])
        sampled_log_probs = torch.from_numpy(rollouts.log_probs[rows])
        support = BehaviorSupport.from_topk(ids, log_probs, response, sampled_log_probs)
        policy = policy_statistics(logits, support, temperature=request.settings.temperature)
        advantages = torch.full((len(response),), float(rng.normal()))
        yield Tokens(ids, log_probs, response, sampled_log_probs, policy, advantages)


def synthetic_tokens(count: int, chunk: int, vocab_size: int, seed: int) -> Iterator[Tokens]:
    """Tokens of a made-up engine and policy over a large vocabulary, K = 20.

    mu's largest probability is anywhere in 0.05 ... 0.999, the next ones fall by a factor of 0.5
    to 0.95, and 1e-6 to 1e-1 is left for the tail; the policy's log-probs differ by a normal
    deviate of 0.05 to 1 nats. The policy's tail is given by its mass and by how many tokens share
    it, 1 to 10,000.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    k = 20
    for start in range(0, count, chunk):
        n = min(chunk, count - start)
        largest, ratio = uniform(0.05, 0.999, n, 1), uniform(0.5, 0.95, n, 1)
        mu_tail = (1 - largest) * 10 ** uniform(-6, -1, n, 1)
        falling = ratio ** torch.arange(k - 1, dtype=torch.float64)
        others = (1 - largest - mu_tail) * falling / falling.sum(1, keepdim=True)
        mu = torch.cat([largest, others], dim=1).sort(dim=1, descending=True).values
        first = torch.randint(vocab_size, (n, 1), generator=generator)
        ids = (first + torch.arange(k + 1) * ID_STEP) % vocab_size  # distinct
        # The sampled token: one of the K, or (the last id) one of the tail.
        place = torch.multinomial(torch.cat([mu, mu_tail], 1), 1, generator=generator)
        outside = mu[:, -1:] * uniform(0.05, 1, n, 1)
        columns = torch.cat([mu, torch.minimum(outside, mu_tail)], dim=1)
        spread = 10 ** uniform(-1.3, 0, n, 1)
        noise = spread * torch.randn(n, k + 2, generator=generator, dtype=torch.float64)
        rest = (1 - columns.sum(1, keepdim=True)).clamp_min(0) + 1e-9
        pi = torch.cat([columns, rest], dim=1) * noise.exp()
        pi = pi / pi.sum(1, keepdim=True)
        is_tail = place == k
        # Where nothing of the tail was sampled, its token is part of the tail.
        pi_tail = (pi[:, k + 1 :] + torch.where(is_tail, 0, pi[:, k : k + 1])).squeeze(1)
        sharers = 10 ** uniform(0, 4, n)
        square = (pi[:, :k] ** 2).sum(1) + torch.where(is_tail, pi[:, k : k + 1] ** 2, 0).sum(1)
        support_log_probs = pi[:, : k + 1].log()
        support_log_probs[:, k:] = torch.where(is_tail, support_log_probs[:, k:], -torch.inf)
        policy = PolicyStatistics(
            log_prob=pi.gather(1, place).log().squeeze(1).float(),
            support_log_probs=support_log_probs.float(),
            tail_prob=pi_tail.float(),
            sum_square=(square + pi_tail**2 / sharers).float(),
            tail_sum_square=(pi_tail**2 / sharers).float(),
            tail_max=(pi_tail / sharers**0.5).float(),
            entropy=torch.zeros(n),
            vocab_size=vocab_size,
        )
        yield Tokens(
            ids[:, :k],
            mu.log().float(),
            ids.gather(1, place).squeeze(1),
            columns.gather(1, place).log().squeeze(1).float(),
            policy,
            torch.randn(n, generator=generator),
        )
