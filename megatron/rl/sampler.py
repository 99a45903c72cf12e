# SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of a run: prompts, rollout engine and rewards become a rollout batch."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron.rl.batch import Sequences
from megatron.rl.config import Config
from megatron.rl.data.prompt_batch import PromptBatch
from megatron.rl.data.prompt_source import PromptSource
from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.rewards.registry import make_task
from megatron.rl.rewards.scoring import RewardBatch, score_batch
from megatron.rl.rollout.from_config import engine_config
from megatron.rl.rollout.protocol import GenerationRequest, Rollouts, SamplingSettings
from megatron.rl.rollout.vllm_engine import VLLMEngine
from pdm import group_advantages


@dataclass(frozen=True)
class RolloutBatch:
    """A rollout batch ready to train on, and what is known of it."""

    sequences: Sequences
    metrics: dict[str, float]


class Sampler:
    """Samples from the current policy and scores what it says. Lives on rank 0 only."""

    def __init__(self, config: Config, folder: Path, on_event: Callable[[str], None]) -> None:
        self._config = config
        rollout = config.rollout
        self.engine = VLLMEngine(engine_config(config, folder), on_event=on_event)
        self.engine.start()  # loads while the trainer builds its model
        self._on_event = on_event
        self._task = make_task(config.task.name, config.task.params, exact=config.task.exact)
        self._tokenizer = PromptTokenizer(config.model.path)
        self._prompts = PromptSource(
            self._task,
            self._tokenizer.encode_prompt,
            seed=config.run.seed,
            max_prompt_tokens=rollout.max_prompt_tokens,
        )

    def wait_ready(self) -> None:
        """Block until the engine has loaded the starting policy."""
        self.engine.wait_ready()

    def sample(self, number: int) -> RolloutBatch:
        """Sample, score and compare rollout batch ``number``."""
        config = self._config
        started = time.perf_counter()
        prompts = self._prompts.next_batch(config.rollout.prompts)
        rollouts = self._generate(prompts, config.rollout.group_size, self._training(number))
        sampled = time.perf_counter()
        rewards = self._score(prompts, rollouts)
        advantages = config.train.advantage_scale * group_advantages(
            torch.from_numpy(rewards.rewards),
            torch.from_numpy(rollouts.prompt_index.astype(np.int64)),
            normalize=config.train.advantage_normalize,
        )
        lengths = rollouts.lengths
        metrics = {
            "reward": float(rewards.rewards.mean()),
            "reward_std": float(rewards.rewards.std()),
            "reward_failures": rewards.raised + rewards.invalid,
            "groups_without_signal": _constant_groups(rewards.rewards, rollouts.prompt_index),
            "response_length": float(lengths.mean()),
            "response_length_max": int(lengths.max()),
            "truncated": float(1 - rollouts.finished.mean()),
            "response_tokens": rollouts.num_tokens,
            "prompts_dropped": prompts.dropped,
            "policy_version": rollouts.policy_version,
            "time/rollout_s": sampled - started,
            "time/reward_s": time.perf_counter() - sampled,
            "tokens_per_s/rollout": rollouts.num_tokens / (sampled - started),
        }
        return RolloutBatch(_sequences(prompts, rollouts, advantages.float().numpy()), metrics)

    def heldout_reward(self) -> dict[str, float]:
        """Return the mean reward on the held-out prompts, and its standard error."""
        settings = SamplingSettings(
            max_tokens=self._config.rollout.max_response_tokens,
            temperature=self._config.eval.temperature,
            top_p=self._config.eval.top_p,
            top_logprobs=0,
            seed=self._seed("heldout", 0),
            stop_token_ids=self._tokenizer.eos_token_ids,
            training=False,
        )
        prompts = self._prompts.heldout(self._config.eval.prompts)
        rollouts = self._generate(prompts, 1, settings)
        rewards = self._score(prompts, rollouts).rewards
        return {
            "heldout_reward": float(rewards.mean()),
            "heldout_reward_stderr": float(rewards.std() / np.sqrt(len(rewards))),
            "heldout_response_length": float(rollouts.lengths.mean()),
        }

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give the engine the policy's weights."""
        self.engine.update_weights(tensors, version)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def _training(self, number: int) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            top_logprobs=rollout.top_logprobs,
            seed=self._seed("train", number),
            stop_token_ids=self._tokenizer.eos_token_ids,
        )

    def _seed(self, purpose: Literal["train", "heldout"], number: int) -> int:
        entropy = [self._config.run.seed, ("train", "heldout").index(purpose), number]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _generate(self, prompts: PromptBatch, samples: int, settings: SamplingSettings) -> Rollouts:
        request = GenerationRequest(prompts.prompt_tokens, prompts.offsets, samples, settings)
        return self.engine.generate(request)

    def _score(self, prompts: PromptBatch, rollouts: Rollouts) -> RewardBatch:
        decode = self._tokenizer.decode_response
        responses = [decode(rollouts.response(b).tolist()) for b in range(rollouts.num_sequences)]
        asked = [prompts.prompts[i] for i in rollouts.prompt_index]
        rewards = score_batch(self._task, responses, asked)
        if rewards.first_error is not None:
            count = rewards.raised + rewards.invalid
            self._on_event(f"{count} responses could not be scored; first: {rewards.first_error}")
        return rewards


def _constant_groups(rewards: np.ndarray, group: np.ndarray) -> float:
    """Share of groups whose rewards are all equal, which teach nothing."""
    names, index = np.unique(group, return_inverse=True)
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, index, rewards)
    np.maximum.at(high, index, rewards)
    return float((low == high).mean())


def _sequences(prompts: PromptBatch, rollouts: Rollouts, advantages: np.ndarray) -> Sequences:
    asked = [prompts.tokens_of(i) for i in rollouts.prompt_index]
    return Sequences(
        prompt_tokens=np.concatenate(asked),
        prompt_offsets=np.cumsum([0, *(len(tokens) for tokens in asked)]),
        response_tokens=rollouts.response_tokens,
        response_offsets=rollouts.response_offsets,
        group=prompts.prompt_ids[rollouts.prompt_index],
        advantages=advantages,
        log_probs=rollouts.log_probs,
        topk_ids=rollouts.topk_ids,
        topk_log_probs=rollouts.topk_log_probs,
    )
