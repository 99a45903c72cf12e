# SPDX-License-Identifier: Apache-2.0
"""`pdm` alone, in a plain PyTorch loop: a tiny next-token policy learns to count.

    python examples/pdm_only.py

A batch is sampled once, recorded as a rollout engine would record it (top-K log-probabilities and
the sampled token's own), and then trained on for several optimizer steps: the policy moves away
from the one that sampled, and the mask decides which tokens may push it further. Prints the mean
reward of the first and of the last batch, and the share of tokens vetoed in between: from 0.03 to
0.87 with 1.2 % vetoed, in 4 s on one CPU core.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdm import BehaviorSupport, PolicyLossConfig, group_advantages, policy_loss, policy_statistics

VOCAB, TOP_K, LENGTH, GROUP_SIZE = 32, 8, 8, 8
BATCHES, STEPS_PER_BATCH, LEARNING_RATE = 40, 6, 0.02


@dataclass(frozen=True)
class Outcome:
    """Mean reward of the first and of the last batch, and vetoed / trained tokens of all steps."""

    reward_before: float
    reward_after: float
    vetoed_share: float


@torch.no_grad()
def rollout(policy: torch.nn.Module, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Sample LENGTH tokens after each prompt [B]: tokens [B, 1 + LENGTH], log mu [B, LENGTH, V]."""
    tokens, log_mu = [prompts], []
    for _ in range(LENGTH):
        log_mu.append(policy(tokens[-1]).log_softmax(dim=-1))
        tokens.append(torch.multinomial(log_mu[-1].exp(), 1).squeeze(-1))
    return torch.stack(tokens, dim=1), torch.stack(log_mu, dim=1)


def train(config: PolicyLossConfig, seed: int = 0) -> Outcome:
    """Train from scratch; the reward is the share of tokens that are their predecessor plus 1."""
    torch.manual_seed(seed)
    policy = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB))
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    prompts = torch.arange(VOCAB).repeat_interleave(GROUP_SIZE)
    mean_rewards, vetoed, trained = [], 0, 0
    for _ in range(BATCHES):
        tokens, log_mu = rollout(policy, prompts)
        inputs, sampled = tokens[:, :-1], tokens[:, 1:]
        top = log_mu.topk(TOP_K, dim=-1)  # all that an engine would report, besides:
        own = log_mu.gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        support = BehaviorSupport.from_topk(top.indices, top.values, sampled, own)

        rewards = (sampled == (inputs + 1) % VOCAB).float().mean(dim=1)
        mean_rewards.append(rewards.mean().item())
        advantages = group_advantages(rewards, prompts).unsqueeze(1).expand(-1, LENGTH)
        for _ in range(STEPS_PER_BATCH):  # mu stays what was recorded
            stats = policy_statistics(policy(inputs), support)
            result = policy_loss(stats, support, advantages, config)
            optimizer.zero_grad()
            (result.loss / result.num_tokens).backward()
            optimizer.step()
            vetoed += int((~result.mask.keep).sum())
            trained += int(result.num_tokens)
    return Outcome(mean_rewards[0], mean_rewards[-1], vetoed / trained)


if __name__ == "__main__":
    outcome = train(PolicyLossConfig(direction="uniform", threshold=0.15))
    print(f"mean reward {outcome.reward_before:.2f} -> {outcome.reward_after:.2f}")
    print(f"vetoed {outcome.vetoed_share:.1%} of the trained tokens")
