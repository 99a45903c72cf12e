# SPDX-License-Identifier: Apache-2.0
"""The training half of an engine's owner: its share of a rollout batch, round by round."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.rl.batch import Sequences
from megatron.rl.batch_draft import BatchDraft, BatchReport, RoundReport
from megatron.rl.config import Config
from megatron.rl.data.prompt_batch import PromptBatch
from megatron.rl.dynamic_sampling import SamplingRound, teaching_groups
from megatron.rl.exchange import TopKForm
from megatron.rl.rewards.reward_terms import shape_rewards
from megatron.rl.rollout.errors import WeightsLost
from megatron.rl.rollout.protocol import SamplingSettings
from megatron.rl.rollout.records.record import Record
from megatron.rl.rollout.replay_engine import ReplayEngine
from megatron.rl.rollout.topology import PromptShare
from megatron.rl.sampled_groups import SampledGroups
from megatron.rl.sampler import Answered, Sampler
from pdm import group_advantages


@dataclass(frozen=True)
class Sampled:
    """An engine's share of a rollout batch.

    record: the same sequences as they are written; they share memory with ``sequences``.
    """

    sequences: Sequences
    report: BatchReport
    record: Record


class BatchSampler:
    """Samples what is trained on with an owner's engine.

    Every owner draws the whole stream of prompts, which is the same for all, and takes its share of
    each round.
    """

    def __init__(self, config: Config, sampler: Sampler, form: TopKForm) -> None:
        """Nothing is sampled yet.

        Args:
            form: of the top-K columns that the engine gives.
        """
        self._config = config
        self._sampler = sampler
        self._form = form

    def sample_round(self, number: int, this: SamplingRound) -> int:
        """Sample and score this engine's share of a round for rollout batch ``number``.

        Returns:
            How many of its groups can be trained on.

        Raises:
            WeightsLost: a restarted engine needs the weights again; ask again after an update.
        """
        rollout, sampler = self._config.rollout, self._sampler
        cursor = sampler.prompts.state()
        batch, share = self._round_prompts(number, this)
        groups = SampledGroups.none(self._form, self._config.reward.terms)
        failures, timeouts, rollout_s, reward_s = 0, 0, 0.0, 0.0
        if share.stop > share.start:
            try:
                answered = sampler.answer(
                    batch.between(share.start, share.stop),
                    rollout.group_size,
                    self._settings(number),
                    first_sequence=this.first_prompt * rollout.group_size
                    + share.first_sequence(rollout.group_size),
                )
            except WeightsLost:
                sampler.prompts.load_state(cursor)
                raise
            groups = self._groups(answered)
            failures, timeouts = answered.failures, answered.timeouts
            rollout_s, reward_s = answered.rollout_s, answered.reward_s
        if this.number == 0:
            self._draft = self._new_draft()
        report = RoundReport.of(
            groups,
            reward_failures=failures,
            reward_timeouts=timeouts,
            dropped=batch.dropped,
            rollout_s=rollout_s,
            reward_s=reward_s,
        )
        return self._draft.add(groups, report)

    def finish_batch(self, number: int, counts: Sequence[int]) -> Sampled:
        """Return this engine's share of rollout batch ``number``, and record it if configured so.

        Args:
            counts: groups that each engine contributes.
        """
        engine, samples = self._sampler.place.number, self._config.rollout.group_size
        groups = self._draft.take(counts[engine])
        info = self._sampler.record_info(
            number,
            self._settings(number),
            samples,
            first_sequence=sum(counts[:engine]) * samples,
            batch_sequences=sum(counts) * samples,
        )
        record = groups.record(info)
        # A batch without any group is recorded too, by the first engine: replay finds every batch.
        if len(groups) or (not any(counts) and engine == 0):
            self._sampler.write_later(record)
        return Sampled(sequences_of(record), self._draft.report(groups), record)

    def _new_draft(self) -> BatchDraft:
        refills = self._config.rollout.refills > 0
        keeps = self._config.rollout.refill_policy == "keep"
        return BatchDraft(refills=refills, fills_up=refills and keeps)

    def _round_prompts(self, number: int, this: SamplingRound) -> tuple[PromptBatch, PromptShare]:
        """The prompts of a round, of all engines, and which of them are this engine's."""
        sampler, engine = self._sampler, self._sampler.engine
        place = sampler.place.number
        if not (isinstance(engine, ReplayEngine) and self._config.rollout.refill_rounds):
            return sampler.prompts.next_batch(this.num_prompts), this.share(place)
        # Which prompts of the stream a refilled batch is made of, only its record knows.
        batch = sampler.prompts.at(engine.prompt_ids(number).tolist())
        edges = [len(batch) * e // sampler.num_engines for e in range(sampler.num_engines + 1)]
        share = PromptShare(*tuple(itertools.pairwise(edges))[place])
        if share.start == share.stop:
            engine.skip(number)
        return batch, share

    def _settings(self, number: int) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            top_logprobs=rollout.top_logprobs,
            topk_precision=rollout.topk_precision,
            seed=self._sampler.seed("train", number),
            stop_token_ids=self._sampler.stop_token_ids,
        )

    def _groups(self, answered: Answered) -> SampledGroups:
        """Turn answers into what is trained on: rewards, advantages, what the loss counts."""
        rollout, train, rollouts = self._config.rollout, self._config.train, answered.rollouts
        rewards = shape_rewards(
            self._config.reward,
            answered.scores,
            answered.answers,
            rollouts.lengths,
            rollout.max_response_tokens,
        )
        advantages = group_advantages(
            torch.from_numpy(rewards.rewards),
            torch.from_numpy(rollouts.prompt_index.astype(np.int64)),
            normalize=train.advantage_normalize,
        )
        everything = np.ones(rollouts.num_sequences, dtype=np.bool_)
        in_loss = rollouts.finished if train.overlong_filter else everything
        prompts = answered.prompts
        return SampledGroups(
            tuple(prompts.tokens_of(place) for place in range(len(prompts))),
            prompts.prompt_ids,
            rollouts,
            rewards,
            (train.advantage_scale * advantages).float().numpy(),
            in_loss,
            teaching_groups(answered.scores, advantages.numpy(), in_loss, rollout.group_size),
        )


def sequences_of(record: Record) -> Sequences:
    """Return what is trained on of a record."""
    rollouts = record.rollouts
    return Sequences(
        number=record.info.first_sequence + np.arange(len(record)),
        prompt_tokens=record.prompt_tokens,
        prompt_offsets=record.prompt_offsets,
        response_tokens=rollouts.response_tokens,
        response_offsets=rollouts.response_offsets,
        group=record.prompt_ids,
        advantages=record.advantages,
        log_probs=rollouts.log_probs,
        topk=rollouts.topk,
        policy_versions=rollouts.policy_versions,
    )
