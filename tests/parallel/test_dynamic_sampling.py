# SPDX-License-Identifier: Apache-2.0
"""Rounds of sampling over two owners of engines, and steps in which responses leave the loss.

The engine is scripted: what a prompt's group scores follows from the prompt's place in the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import QWEN3, random_tensors, write_checkpoint
from tests.parallel.policy_case import LOSS, build_policy, make_sequences
from tests.parallel.spawn import run_ranks

SAMPLES = 2
PROMPTS = 5
# Draw d of the stream teaches if it is one of these; with 5 prompts a batch, rounds sample 5, 3, 2
# (none of which teaches), 2 and so on.
TEACHING = (1, 4, 7, 10, 11, 13)


@dataclass
class ScriptedOwner:
    """What a BatchSampler needs of a Sampler, with an engine that answers from a script."""

    place: Any
    prompts: Any
    num_engines: int
    fails: list[int]
    """Calls of :meth:`answer` that find the engine without weights."""
    engine: object = None
    stop_token_ids: tuple[int, ...] = (0,)
    asked: list[tuple[int, list[int]]] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    calls: int = 0

    def seed(self, purpose: str, number: int) -> int:
        return 100 + number

    def answer(self, prompts: Any, samples: int, settings: Any, first_sequence: int) -> Any:
        """Scores 1 and 0 for a prompt that teaches, else equal ones; one token a response."""
        from megatron.rl.rollout.errors import WeightsLost
        from megatron.rl.rollout.records.record import group_index
        from megatron.rl.rollout.rollouts import Rollouts
        from megatron.rl.rollout.topk_columns import TopKColumns
        from megatron.rl.sampler import Answered

        self.calls += 1
        if self.calls in self.fails:
            raise WeightsLost("restarted without weights")
        draws = prompts.prompt_ids.tolist()
        self.asked.append((first_sequence, draws))
        count = len(draws) * samples
        scores = np.array([float(i == 0 and d in TEACHING) for d in draws for i in range(samples)])
        tokens = np.repeat(draws, samples).astype(np.int32)
        rollouts = Rollouts(
            group_index(count, samples),
            tokens,
            np.arange(count + 1),
            np.full(count, -1.0, np.float32),
            TopKColumns.encode(tokens[:, None], np.full((count, 1), -1.0), 64, "fp24"),
            np.full(count, settings.seed - 101, np.int32),
            np.ones(count, np.bool_),
            np.zeros(count, np.bool_),
            0.0,
        )
        return Answered(prompts, rollouts, scores, (None,) * count, 0, 0, 1.0, 0.5)

    def record_info(self, number: int, settings: Any, samples: int, **places: int) -> Any:
        from megatron.rl.rollout.records.record import RecordInfo

        return RecordInfo(
            purpose="train",
            number=number,
            engine=self.place.number,
            samples_per_prompt=samples,
            vocab_size=64,
            settings=settings,
            engine_settings={},
            **places,
        )

    def write_later(self, record: Any) -> None:
        self.records.append(record)


class OneTask:
    """Prompt i of the stream is the text of i: no permutation, since an epoch has one prompt."""

    name = "one"

    def prompt(self, split: str, seed: int, index: int) -> Any:
        from megatron.rl.rewards.task import Prompt

        return Prompt("x", split, index, {})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scenario:
    """Settings of ``rollout``, the batches to sample, and the calls that fail, by rank."""

    rollout: dict[str, Any]
    batches: int = 1
    fails: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]


SCENARIOS = {
    "refill": Scenario({"refill_rounds": 3}),
    "two batches": Scenario({"refill_rounds": 1}, batches=2),
    "keep": Scenario({"refill_rounds": 1, "refill_policy": "keep"}),
    "nothing": Scenario({"refill_rounds": 2}, batches=3),
    "lost weights": Scenario({"refill_rounds": 3}, fails=([], [2, 3])),
}


def sample_scenarios(rank: int, world_size: int) -> dict[str, Any]:
    return {name: sample_batches(rank, scenario) for name, scenario in SCENARIOS.items()}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    """By scenario, of both ranks: see :func:`sample_batches`."""
    ranks = run_ranks(sample_scenarios, 2)
    return {name: [rank[name] for rank in ranks] for name in SCENARIOS}


def sample_batches(rank: int, scenario: Scenario) -> Any:
    """Sample batches on two owners; returns what each asked for, and what became of it."""
    from megatron.rl.batch_sampler import BatchSampler
    from megatron.rl.config import parse_config
    from megatron.rl.data.prompt_source import PromptSource
    from megatron.rl.epoch_plan import plan_epoch
    from megatron.rl.exchange import Exchange, SequenceTable, TopKForm
    from megatron.rl.rollout_metrics import rollout_metrics
    from megatron.rl.rollout_session import RolloutSession

    config = parse_config(
        {
            "run": {"device": "cpu"},
            "model": {"path": "unused"},
            "task": {"name": "unused"},
            "parallel": {"data": 2},
            "rollout": {
                "engines_per_node": 2, "prompts": PROMPTS, "group_size": SAMPLES,
                "top_logprobs": 1, "max_response_tokens": 4, "max_prompt_tokens": 64,
                **scenario.rollout,
            },
            "train": {"minibatch_prompts": 2},
            "bridge": {"probe_tokens": 4},
            "eval": {"prompts": 2},
        }
    )  # fmt: skip
    updates: list[int] = []
    session = RolloutSession(config, note=lambda text: None)
    form = TopKForm(1, 64, "fp24")
    owner = ScriptedOwner(
        session._topology.engine_of(rank),
        PromptSource(
            OneTask(), lambda text: [5, 6], seed=1, max_prompt_tokens=8, prompts_per_epoch=1
        ),
        num_engines=2,
        fails=list(scenario.fails[rank]),
    )
    session._sampler = owner  # type: ignore[assignment]
    session._batch_sampler = BatchSampler(config, owner, form)  # type: ignore[arg-type]
    session._exchange = Exchange(session._topology, config.parallel, form)
    session._bridge = type("Bridge", (), {"update": lambda self, v: updates.append(v)})()
    outcomes = []
    for number in range(1, scenario.batches + 1):
        sampled = session._sample(number)
        assert sampled is not None
        reports = session._exchange.gather_reports(sampled.report)
        tables = [report.table for report in reports]
        table = SequenceTable.join(tables)
        plan = plan_epoch(table, config, np.random.default_rng(0))
        got = session._exchange.distribute(sampled.sequences, tables, plan.replica)
        metrics = rollout_metrics(reports, config)
        outcomes.append(
            {
                "groups": table.group[::SAMPLES].tolist(),
                "numbers": got.number.tolist(),
                "steps": [step.size.sequences for step in plan.steps],
                "metrics": {k: v for k, v in metrics.items() if "refill" in k or "signal" in k},
                "reward": metrics["reward"],
            }
        )
    return outcomes, owner.asked, updates, [_summary(r) for r in owner.records]


def _summary(record: Any) -> tuple[int, int, list[int]]:
    info = record.info
    return info.first_sequence, info.batch_sequences, record.prompt_ids[:: info.samples_per_prompt]


def test_owners_agree_on_rounds_and_draw_the_stream_alike(outcomes: dict[str, list[Any]]) -> None:
    """Draws 0 to 4, then 3 missing: 5 to 7, then 2: 8 and 9, then 2: 10 and 11."""
    ranks = outcomes["refill"]
    for batches, _, updates, _ in ranks:
        (outcome,) = batches
        # Engine 0 has draws 0, 1 and misses 1; engine 1 has 2, 3, 4 and misses 2.
        assert sorted(outcome["groups"]) == [1, 4, 7, 10, 11]
        assert outcome["steps"] == [4, 4, 2]
        assert outcome["metrics"] == {
            "groups_without_signal": 7 / 12,
            "refill/rounds": 3,
            "refill/sampled_prompts": 12,
            "refill/trained_prompts": 5,
            "refill/dropped_groups": 7,
        }
        assert outcome["reward"] == 5 / 24, "of all that was sampled"
        assert updates == []
    assert ranks[0][0][0]["groups"] == ranks[1][0][0]["groups"]
    # Everybody's sequences are numbered by all that are sampled for the batch: seeds are distinct.
    assert ranks[0][1] == [(0, [0, 1]), (10, [5]), (16, [8]), (20, [10])]
    assert ranks[1][1] == [(4, [2, 3, 4]), (12, [6, 7]), (18, [9]), (22, [11])]
    assert [list(ids) for _, _, ids in (*ranks[0][3], *ranks[1][3])] == [[1, 10], [4, 7, 11]]
    assert [record[:2] for record in (*ranks[0][3], *ranks[1][3])] == [(0, 10), (4, 10)]
    trained = sorted(ranks[0][0][0]["numbers"] + ranks[1][0][0]["numbers"])
    assert trained == list(range(10)), "each sequence reaches one replica"


def test_the_next_batch_begins_where_the_rounds_have_ended(outcomes: dict[str, list[Any]]) -> None:
    ranks = outcomes["two batches"]
    first, second = ranks[0][0]
    assert sorted(first["groups"]) == [1, 4, 7] and first["steps"] == [4, 2]
    assert first["metrics"]["refill/trained_prompts"] == 3
    # Draws 8 to 12, then 3 missing: 13 to 15.
    assert sorted(second["groups"]) == [10, 11, 13]
    assert second["metrics"]["refill/sampled_prompts"] == 8


def test_keep_fills_up_with_groups_that_teach_nothing(outcomes: dict[str, list[Any]]) -> None:
    ranks = outcomes["keep"]
    (outcome,) = ranks[0][0]
    assert outcome["groups"] == [1, 0, 4, 7, 2], "an engine's own, those that teach first"
    assert outcome["steps"] == [4, 4, 2]
    assert outcome["metrics"]["groups_without_signal"] == 5 / 8


def test_nothing_teaches_and_nobody_steps(outcomes: dict[str, list[Any]]) -> None:
    """The third batch: draws 20 and up, which no longer teach."""
    ranks = outcomes["nothing"]
    for batches, _, _, _ in ranks:
        assert batches[-1]["groups"] == [] and batches[-1]["steps"] == []
        assert batches[-1]["numbers"] == []
        assert batches[-1]["metrics"]["refill/sampled_prompts"] == 15
    # The first engine records the empty batch.
    assert len(ranks[0][3]) == len(ranks[1][3]) + 1
    assert ranks[0][3][-1][:2] == (0, 0)


def test_weights_that_are_lost_in_a_later_round_change_nothing(
    outcomes: dict[str, list[Any]],
) -> None:
    plain, failing = outcomes["refill"], outcomes["lost weights"]
    for rank in range(2):
        assert failing[rank][0] == plain[rank][0] and failing[rank][1] == plain[rank][1]
        assert failing[rank][2] == [0, 0], "all ranks send the weights, twice"


def step_with_filter(rank: int, world_size: int, path: str, layouts: list[dict[str, int]]) -> Any:
    """In each layout, a step with an empty minibatch, and with the same responses out of the loss
    or with no advantage; rank 0 returns losses, gradient norms, token counts and weights."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.core import parallel_state

    results = []
    for layout in layouts:
        results.append(
            [_step(path, layout, kind) for kind in ("empty", "filtered", "no advantage")]
        )
        parallel_state.destroy_model_parallel()
    return results


CUT = np.array([0, 3, 4, 5])


def _step(path: str, layout: dict[str, int], kind: str) -> Any:
    import dataclasses

    from megatron.core import parallel_state

    from megatron.rl.batch import pack
    from megatron.rl.config import parse_config
    from megatron.rl.epoch_plan import plan_epoch, plan_scoring
    from megatron.rl.exchange import SequenceTable
    from megatron.rl.metrics import gather_records, loss_metrics
    from megatron.rl.parallel import context_shard
    from megatron.rl.policy.model import is_last_stage

    parallel_state.destroy_model_parallel()
    policy = build_policy(path, layout, clip_grad=1e9, schedule="linear", total_steps=4)
    sequences = make_sequences(policy.architecture.vocab_size)
    in_loss = np.ones(len(sequences), dtype=np.bool_)
    if kind == "empty":
        in_loss[:] = False
    elif kind == "filtered":
        in_loss[CUT] = False
    else:
        advantages = sequences.advantages.copy()
        advantages[CUT] = 0
        sequences = dataclasses.replace(sequences, advantages=advantages)
    table = SequenceTable(
        sequences.group,
        np.diff(sequences.prompt_offsets),
        sequences.response_lengths,
        np.zeros(len(sequences)),
        sequences.advantages,
        in_loss,
        np.zeros(len(sequences), dtype=np.int32),
        in_loss,
    )
    config = parse_config(
        {
            "model": {"path": path},
            "task": {"name": "unused"},
            "parallel": layout,
            "rollout": {"prompts": 4, "group_size": 2, "max_response_tokens": 40},
            "train": {"minibatch_prompts": 4, "micro_batch_tokens": 40},
        }
    )
    plan = plan_epoch(table, config, np.random.default_rng(0))
    assert ((plan.replica >= 0) == in_loss).all()
    scored = plan_scoring(table, config, plan.replica).micro_batches
    everyone = np.concatenate([batch for mine in scored for batch in mine])
    assert sorted(everyone.tolist()) == np.flatnonzero(in_loss).tolist()
    (step,) = plan.steps
    batches = [
        pack(
            sequences,
            members,
            minibatch=step.size,
            loss=LOSS,
            pad_multiple=layout.get("tensor", 1),
            device=torch.device("cpu"),
            context=context_shard(),
        )
        for members in step.micro_batches[parallel_state.get_data_parallel_rank()]
    ]
    policy.pass_over_steps(2)
    result = policy.train_step(batches)
    # The third of four steps from 1e-3 to 0, of which two have been passed over.
    assert result.learning_rate == pytest.approx(1e-3 / 4)
    tokens = None
    if is_last_stage():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        record = gather_records(result.records, group)
        tokens = record.sequence.numel()
        if kind == "empty":
            assert loss_metrics(record) == {}
            assert all(float(loss) == 0.0 for loss in result.losses)
    weights = {name: tensor.clone() for name, tensor in policy.hf_tensors()}
    return result.grad_norm, tokens, step.size, weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "dense", QWEN3))


def test_truncated_responses_leave_gradient_and_denominator(checkpoint: str) -> None:
    layouts = [{"data": 2}, {"tensor": 2}, {"pipeline": 2}]
    ranks = run_ranks(step_with_filter, 2, checkpoint, layouts)
    start = random_tensors(QWEN3, seed=0)
    lengths = make_sequences(QWEN3["vocab_size"]).response_lengths
    total, kept = lengths.sum(), lengths.sum() - lengths[CUT].sum()
    for number, layout in enumerate(layouts):
        empty, filtered, no_advantage = ranks[0][number]
        counts = [outcome[1] for outcome in ranks[-1][number]]
        assert counts == [0, kept, total], layout
        # Nothing is trained on: every rank takes the step, and it moves nothing.
        assert empty[0] == 0.0 and (empty[2].tokens, empty[2].sequences) == (0, 0)
        for name, tensor in empty[3].items():
            assert torch.equal(tensor, start[name]), (layout, name)
        # A token without advantage has no gradient, but is counted: the same sum over other counts.
        assert filtered[0] > 0 and filtered[2].sequences == len(lengths) - len(CUT)
        assert filtered[0] * kept == pytest.approx(no_advantage[0] * total, rel=1e-5), layout
