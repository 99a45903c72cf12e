# SPDX-License-Identifier: Apache-2.0
"""What the owner of an engine does: its share of every batch is prompted, sampled and scored."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from megatron.rl.config import Config
from megatron.rl.data.prompt_batch import PromptBatch
from megatron.rl.data.prompt_source import PromptSource, PromptState
from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.evaluation.in_training import EVALUATIONS_FOLDER, BenchShare, RunBenches
from megatron.rl.exchange import SequenceTable
from megatron.rl.rewards.finished_scorer import FinishedScorer
from megatron.rl.rewards.registry import make_task, task_spec
from megatron.rl.rewards.reward_terms import ShapedRewards, require_answers
from megatron.rl.rewards.scoring_pool import ScoringPool
from megatron.rl.rollout.from_config import engine_settings, make_engine
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.records.record import Purpose, Record, RecordInfo
from megatron.rl.rollout.records.record_folder import RECORDS_FOLDER, RecordWriter
from megatron.rl.rollout.replay_engine import ReplayEngine
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topology import EnginePlace, PromptShare, Topology
from megatron.rl.sampled_groups import SampledGroups


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
class Answered:
    """Prompts, the responses to them, and what the task says of each response.

    scores: float64 [B]. answers: of B responses, what the task found. failures: responses that
    could not be scored. timeouts: of them, those whose scorer ran out of time. The times are as in
    :class:`SampleReport`.
    """

    prompts: PromptBatch
    rollouts: Rollouts
    scores: NDArray[np.float64]
    answers: Sequence[str | None]
    failures: int
    timeouts: int
    rollout_s: float
    reward_s: float


class Sampler:
    """Samples from the current policy with one engine, and scores what it says.

    What is trained on is sampled through batch_sampler.py.

    Attributes:
        place: of the engine.
        prompts: the stream, the same for every owner.
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
        self._folder = folder
        self._topology = topology
        self.place = place
        self._vocab_size = vocab_size
        self._on_event = on_event
        self.engine = make_engine(config, folder, place, self._engine_event)
        self._engine_settings = engine_settings(config)
        spec = task_spec(config.task)
        self._task = make_task(spec)
        require_answers(config.reward, self._task)
        self._scoring = ScoringPool(spec, config.scoring)
        self._tokenizer = PromptTokenizer(
            config.model.path,
            template=config.task.template,
            system_prompt=config.task.system_prompt,
            template_args=config.task.template_args,
        )
        self.prompts = PromptSource(
            self._task,
            self._tokenizer.encode_prompt,
            seed=config.run.seed,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )
        self._benches = RunBenches(
            config, self._tokenizer, engine=place.number, engines=len(topology.engines)
        )
        self._records: RecordWriter | None = None
        if config.records.write:
            self._records = RecordWriter(folder / RECORDS_FOLDER, config.records.keep)

    def wait_ready(self) -> None:
        """Block until the engine has loaded the starting policy, and scoring its task."""
        sandbox = self._scoring.start()
        if not sandbox.complete:
            self._on_event(f"scoring is not fully sandboxed here: {'; '.join(sandbox.missing)}")
        removed = getattr(self._task, "removed_from_train", 0)
        if removed and self.place.number == 0:
            self._on_event(f"{removed} training problems are held out as well and left out")
        info = self.engine.wait_ready()
        if info is not None:
            self._engine_settings["vllm_version"] = info.vllm_version

    def skip(self, batches: int) -> None:
        """Draw the prompts of rollout batches that a run before this one has trained on."""
        if isinstance(self.engine, ReplayEngine):
            self.engine.skip(batches)
        for _ in range(batches):
            self.prompts.next_batch(self._config.rollout.prompts)

    def resume(self, prompts: PromptState | None, *, trained: int, evaluated: int) -> None:
        """Continue behind what a run before this one has done in this folder.

        Args:
            prompts: where the stream continues; None: at its start.
            trained: rollout batches that are not sampled again.
            evaluated: as in :meth:`ReplayEngine.skip`.
        """
        if prompts is not None:
            self.prompts.load_state(prompts)
        if isinstance(self.engine, ReplayEngine):
            self.engine.skip(trained, evaluated)
        if self._records is not None:
            self._records.forget(
                self.place.number, self.num_engines, trained=trained, evaluated=evaluated
            )

    def sample_heldout(self, number: int) -> SampleReport:
        """Sample and score this engine's held-out prompts, after ``number`` rollout batches."""
        prompts = self._config.eval.prompts
        share = self._share(prompts, "eval.prompts")
        settings = SamplingSettings(
            max_tokens=self._config.eval.response_limit(self._config.rollout),
            temperature=self._config.eval.temperature,
            top_p=self._config.eval.top_p,
            top_k=self._config.eval.top_k,
            min_p=self._config.eval.min_p,
            top_logprobs=0,
            seed=self.seed("heldout", 0),
            stop_token_ids=self._tokenizer.eos_token_ids,
            training=False,
        )
        batch = self.prompts.heldout(prompts).between(share.start, share.stop)
        answered = self.answer(batch, 1, settings, first_sequence=share.first_sequence(1))
        info = self.record_info(
            number, settings, 1, first_sequence=share.first_sequence(1), batch_sequences=prompts
        )
        groups = _without_advantages(answered)
        self.write_later(groups.record(info))
        return SampleReport(
            groups.table(), answered.failures, 0, answered.rollout_s, answered.reward_s
        )

    def sample_bench(self, name: str, number: int) -> BenchShare:
        """Sample and score this engine's problems of a benchmark; see :meth:`sample_heldout`."""
        folder = self._folder / EVALUATIONS_FOLDER / f"{number:06d}"
        return self._benches.sample(name, self.engine, folder)

    @property
    def num_engines(self) -> int:
        """Engines of the whole run."""
        return len(self._topology.engines)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self._tokenizer.eos_token_ids

    def close(self) -> None:
        """End the engine, the processes that score, and the record that is being written."""
        try:
            self.engine.close()
        finally:
            self._scoring.close()
            if self._records is not None:
                self._records.close()

    def _engine_event(self, text: str) -> None:
        if len(self._topology.engines) > 1:
            text = text.replace("rollout engine", f"rollout engine {self.place.number}", 1)
        self._on_event(text)

    def _share(self, prompts: int, setting: str) -> PromptShare:
        return self._topology.split(prompts, setting)[self.place.number]

    def seed(self, purpose: Purpose, number: int) -> int:
        """Return the seed of a batch, from which those of its sequences follow."""
        entropy = [self._config.run.seed, get_args(Purpose).index(purpose), number]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def answer(
        self,
        prompts: PromptBatch,
        samples: int,
        settings: SamplingSettings,
        first_sequence: int,
    ) -> Answered:
        """Sample responses to prompts; each is scored once it has ended.

        Args:
            first_sequence: number of the first response among all that are sampled for the batch.
                It enters the seeds: a sequence has the same one however the batch is split.
        """
        request = GenerationRequest(
            prompts.prompt_tokens,
            prompts.offsets,
            samples,
            settings,
            first_sequence_index=first_sequence,
        )
        decode = self._tokenizer.decode_response
        with FinishedScorer(self._scoring, decode, prompts, request.num_sequences) as scorer:
            started = time.perf_counter()
            rollouts = self.engine.generate(request, scorer.score)
            rollout_s = time.perf_counter() - started
            scorer.finish(rollouts)
        if scorer.first_error is not None:
            self._on_event(
                f"{scorer.failures} responses could not be scored; first: {scorer.first_error}"
            )
        return Answered(
            prompts,
            rollouts,
            scorer.scores,
            scorer.answers,
            scorer.failures,
            scorer.timeouts,
            rollout_s,
            scorer.seconds,
        )

    def record_info(
        self,
        number: int,
        settings: SamplingSettings,
        samples: int,
        *,
        first_sequence: int,
        batch_sequences: int,
    ) -> RecordInfo:
        """Return what the sequences of a record of this engine's share."""
        return RecordInfo(
            purpose="train" if settings.training else "heldout",
            number=number,
            engine=self.place.number,
            first_sequence=first_sequence,
            batch_sequences=batch_sequences,
            samples_per_prompt=samples,
            vocab_size=self._vocab_size,
            settings=settings,
            engine_settings=self._engine_settings,
        )

    def write_later(self, record: Record) -> None:
        """Write a record in the background, if the run keeps records."""
        if self._records is not None:
            self._records.write_later(record)


def _without_advantages(answered: Answered) -> SampledGroups:
    """Groups of one, which nothing is trained on."""
    count, prompts = answered.rollouts.num_sequences, answered.prompts
    return SampledGroups(
        tuple(prompts.tokens_of(place) for place in range(count)),
        prompts.prompt_ids,
        answered.rollouts,
        ShapedRewards(answered.scores, {}),
        np.zeros(count, dtype=np.float32),
        in_loss=np.zeros(count, dtype=np.bool_),
        teaches=np.zeros(count, dtype=np.bool_),
    )
