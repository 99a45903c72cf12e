# SPDX-License-Identifier: Apache-2.0
"""What the owner of an engine does: its share of every batch is prompted, sampled and scored."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.rl.batch import Sequences
from megatron.rl.config import Config
from megatron.rl.data.prompt_batch import PromptBatch
from megatron.rl.data.prompt_source import PromptSource
from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.exchange import SequenceTable
from megatron.rl.rewards.finished_scorer import FinishedScorer
from megatron.rl.rewards.registry import make_task
from megatron.rl.rollout.errors import WeightsLost
from megatron.rl.rollout.from_config import engine_settings, make_engine
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.records.record import Purpose, Record, RecordInfo
from megatron.rl.rollout.records.record_folder import RECORDS_FOLDER, RecordWriter
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topology import EnginePlace, PromptShare, Topology
from pdm import group_advantages


@dataclass(frozen=True)
class SampleReport:
    """What all ranks learn of an engine's share of a batch.

    reward_failures: responses that could not be scored. dropped: prompts of the whole batch that
    were skipped for their length. rollout_s: seconds until all was sampled. reward_s: seconds of
    scoring, most of them before that, while other sequences were still being sampled.
    """

    table: SequenceTable
    reward_failures: int
    dropped: int
    rollout_s: float
    reward_s: float


@dataclass(frozen=True)
class Sampled:
    """An engine's share of a rollout batch."""

    sequences: Sequences
    report: SampleReport


@dataclass(frozen=True)
class _Answered:
    """Prompts, responses and their rewards; ``batch_prompts`` counts those of all engines."""

    prompts: PromptBatch
    request: GenerationRequest
    batch_prompts: int
    rollouts: Rollouts
    rewards: NDArray[np.float64]
    failures: int
    rollout_s: float
    reward_s: float


class Sampler:
    """Samples from the current policy with one engine, and scores what it says.

    Every owner draws the whole stream of prompts, which is the same for all, and takes its share of
    each batch.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        topology: Topology,
        place: EnginePlace,
        vocab_size: int,
        on_event: Callable[[str], None],
    ) -> None:
        """Start the engine; :meth:`wait_ready` waits for it."""
        self._config = config
        self._topology = topology
        self._place = place
        self._vocab_size = vocab_size
        self._on_event = on_event
        self.engine = make_engine(config, folder, place, self._engine_event)
        self._engine_settings = engine_settings(config)
        self._task = make_task(config.task.name, config.task.params, exact=config.task.exact)
        self._tokenizer = PromptTokenizer(config.model.path)
        self._prompts = PromptSource(
            self._task,
            self._tokenizer.encode_prompt,
            seed=config.run.seed,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )
        self._records: RecordWriter | None = None
        if config.records.write:
            self._records = RecordWriter(folder / RECORDS_FOLDER, config.records.keep)

    def wait_ready(self) -> None:
        """Block until the engine has loaded the starting policy."""
        info = self.engine.wait_ready()
        if info is not None:
            self._engine_settings["vllm_version"] = info.vllm_version

    def skip(self, batches: int) -> None:
        """Draw the prompts of rollout batches that a run before this one has trained on."""
        for _ in range(batches):
            self._prompts.next_batch(self._config.rollout.prompts)

    def sample(self, number: int) -> Sampled:
        """Sample and score this engine's share of rollout batch ``number``.

        Raises:
            WeightsLost: a restarted engine needs the weights again; ask again after an update.
        """
        rollout, train = self._config.rollout, self._config.train
        cursor = self._prompts.state()
        batch = self._prompts.next_batch(rollout.prompts)
        share = self._share(rollout.prompts, "rollout.prompts")
        settings = self._training(number)
        try:
            answered = self._answer(batch, share, rollout.group_size, settings)
        except WeightsLost:
            self._prompts.load_state(cursor)
            raise
        advantages = train.advantage_scale * group_advantages(
            torch.from_numpy(answered.rewards),
            torch.from_numpy(answered.rollouts.prompt_index.astype(np.int64)),
            normalize=train.advantage_normalize,
        )
        record = self._record(number, answered, advantages.float().numpy(), settings)
        return Sampled(_sequences(record), _report(answered, record, batch.dropped))

    def sample_heldout(self, number: int) -> SampleReport:
        """Sample and score this engine's held-out prompts, after ``number`` rollout batches."""
        prompts = self._config.eval.prompts
        share = self._share(prompts, "eval.prompts")
        settings = SamplingSettings(
            max_tokens=self._config.rollout.max_response_tokens,
            temperature=self._config.eval.temperature,
            top_p=self._config.eval.top_p,
            top_logprobs=0,
            seed=self._seed("heldout", 0),
            stop_token_ids=self._tokenizer.eos_token_ids,
            training=False,
        )
        answered = self._answer(self._prompts.heldout(prompts), share, 1, settings)
        no_advantages = np.zeros(len(answered.rewards), dtype=np.float32)
        return _report(answered, self._record(number, answered, no_advantages, settings), dropped=0)

    def close(self) -> None:
        """End the engine, and the record that is being written."""
        try:
            self.engine.close()
        finally:
            if self._records is not None:
                self._records.close()

    def _engine_event(self, text: str) -> None:
        if len(self._topology.engines) > 1:
            text = text.replace("rollout engine", f"rollout engine {self._place.number}", 1)
        self._on_event(text)

    def _share(self, prompts: int, setting: str) -> PromptShare:
        return self._topology.split(prompts, setting)[self._place.number]

    def _training(self, number: int) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            top_logprobs=rollout.top_logprobs,
            topk_precision=rollout.topk_precision,
            seed=self._seed("train", number),
            stop_token_ids=self._tokenizer.eos_token_ids,
        )

    def _seed(self, purpose: Purpose, number: int) -> int:
        entropy = [self._config.run.seed, get_args(Purpose).index(purpose), number]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _answer(
        self, batch: PromptBatch, share: PromptShare, samples: int, settings: SamplingSettings
    ) -> _Answered:
        """Sample responses to the share's prompts; each is scored once it has ended."""
        prompts = batch.between(share.start, share.stop)
        request = GenerationRequest(
            prompts.prompt_tokens,
            prompts.offsets,
            samples,
            settings,
            first_sequence_index=share.first_sequence(samples),
        )
        decode = self._tokenizer.decode_response
        scorer = FinishedScorer(self._task, decode, prompts, request.num_sequences)
        started = time.perf_counter()
        rollouts = self.engine.generate(request, scorer.score)
        rollout_s = time.perf_counter() - started
        scorer.score_rest(rollouts)
        if scorer.first_error is not None:
            self._on_event(
                f"{scorer.failures} responses could not be scored; first: {scorer.first_error}"
            )
        return _Answered(
            prompts,
            request,
            len(batch),
            rollouts,
            scorer.rewards,
            scorer.failures,
            rollout_s,
            scorer.seconds,
        )

    def _record(
        self,
        number: int,
        answered: _Answered,
        advantages: NDArray[np.float32],
        settings: SamplingSettings,
    ) -> Record:
        """Make the record of a share, and write it if the run keeps records."""
        request, prompts = answered.request, answered.prompts
        samples = request.samples_per_prompt
        asked = [prompts.tokens_of(i) for i in answered.rollouts.prompt_index]
        record = Record(
            RecordInfo(
                purpose="train" if settings.training else "heldout",
                number=number,
                engine=self._place.number,
                first_sequence=request.first_sequence_index,
                batch_sequences=answered.batch_prompts * samples,
                samples_per_prompt=samples,
                vocab_size=self._vocab_size,
                settings=settings,
                engine_settings=self._engine_settings,
            ),
            prompt_tokens=np.concatenate(asked),
            prompt_offsets=np.cumsum([0, *(len(tokens) for tokens in asked)]),
            prompt_ids=prompts.prompt_ids[answered.rollouts.prompt_index],
            rewards=answered.rewards,
            advantages=advantages,
            rollouts=answered.rollouts,
        )
        if self._records is not None:
            self._records.write_later(record)
        return record


def _sequences(record: Record) -> Sequences:
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


def _report(answered: _Answered, record: Record, dropped: int) -> SampleReport:
    rollouts = record.rollouts
    versions = [
        rollouts.policy_versions[first:last].max(initial=-1)
        for first, last in itertools.pairwise(rollouts.response_offsets)
    ]
    table = SequenceTable(
        group=record.prompt_ids,
        prompt_lengths=np.diff(record.prompt_offsets),
        response_lengths=rollouts.lengths,
        rewards=record.rewards,
        advantages=record.advantages,
        finished=rollouts.finished,
        versions=np.array(versions, dtype=np.int32),
    )
    return SampleReport(table, answered.failures, dropped, answered.rollout_s, answered.reward_s)
