# SPDX-License-Identifier: Apache-2.0
"""Which groups teach, which prompts each round samples, and what an engine hands on."""

import dataclasses
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.batch_draft import BatchDraft, RoundReport
from megatron.rl.dynamic_sampling import SamplingRound, sample_rounds, teaching_groups
from megatron.rl.exchange import TopKForm
from megatron.rl.rewards.reward_terms import ShapedRewards
from megatron.rl.rollout.protocol import SamplingSettings
from megatron.rl.rollout.records.record import RecordInfo, group_index
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns
from megatron.rl.sampled_groups import SampledGroups

SAMPLES = 3
TOP_K = 2
VOCAB_SIZE = 100
FORM = TopKForm(TOP_K, VOCAB_SIZE, "float32")


def make_groups(ids: list[int], teaches: list[bool], version: int = 1) -> SampledGroups:
    """Groups whose arrays all tell the prompt and the response that they belong to."""
    number = np.repeat(ids, SAMPLES) * 10 + np.tile(np.arange(SAMPLES), len(ids))
    lengths = 1 + number % 4
    tokens = np.repeat(number, lengths).astype(np.int32) % VOCAB_SIZE
    log_probs = -np.stack([np.arange(len(tokens)), np.arange(len(tokens)) + 1], axis=1) / 8 - 0.1
    rollouts = Rollouts(
        prompt_index=group_index(len(number), SAMPLES),
        response_tokens=tokens,
        response_offsets=np.cumsum([0, *lengths]),
        log_probs=-tokens.astype(np.float32),
        topk=TopKColumns.encode(
            np.stack([tokens, tokens], axis=1), log_probs, VOCAB_SIZE, "float32"
        ),
        policy_versions=np.full(len(tokens), version, dtype=np.int32),
        finished=number % 2 == 0,
        aborted=np.zeros(len(number), dtype=np.bool_),
        generation_s=1.0,
    )
    return SampledGroups(
        tuple(np.full(1 + id % 3, id, dtype=np.int32) for id in ids),
        np.array(ids, dtype=np.int64),
        rollouts,
        ShapedRewards(number / 1000, {"length": -number / 8000}),
        number.astype(np.float32),
        rollouts.finished,
        np.array(teaches, dtype=np.bool_),
    )


def add(draft: BatchDraft, groups: SampledGroups) -> int:
    report = RoundReport.of(
        groups, reward_failures=1, reward_timeouts=0, dropped=2, rollout_s=1.5, reward_s=0.5
    )
    return draft.add(groups, report)


@pytest.mark.parametrize(
    ("scores", "advantages", "in_loss", "teaches"),
    [
        ([1, 0, 0], [2, -1, -1], [1, 1, 1], True),
        ([1, 1, 1], [0, 0, 0], [1, 1, 1], False),
        ([0, 0, 0], [0, 0, 0], [1, 1, 1], False),
        # Only shaping terms differ.
        ([0, 0, 0], [1, -1, 0], [1, 1, 1], False),
        # A term outweighs the difference of the scores.
        ([1, 0, 0], [0, 0, 0], [1, 1, 1], False),
        # The overlong filter leaves nothing, or nothing but the mean.
        ([1, 0, 0], [2, -1, -1], [0, 0, 0], False),
        ([1, 0, 0.5], [1, -1, 0], [0, 0, 1], False),
        ([1, 0, 0.5], [1, -1, 0], [0, 1, 1], True),
    ],
)
def test_a_group_teaches_if_scores_differ_and_the_loss_counts_an_advantage(
    scores: list[float], advantages: list[float], in_loss: list[int], teaches: bool
) -> None:
    found = teaching_groups(
        # Beside a group of another level: it is each group's own range that counts.
        np.array([*scores, 0.5, 0.5, 0.5]),
        np.array([*advantages, 0.0, 0.0, 0.0]),
        np.array([*in_loss, 1, 1, 1], dtype=np.bool_),
        SAMPLES,
    )
    assert found.tolist() == [teaches, False]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 5), st.randoms())
def test_rounds_take_the_stream_in_order_and_never_too_much(
    wanted: list[int], refills: int, random: Random
) -> None:
    """Against a plain count: each engine gets what it still needs, in the order of the stream."""
    rounds: list[SamplingRound] = []
    have = [0] * len(wanted)

    def sample(this: SamplingRound) -> list[int]:
        needs = [want - got for want, got in zip(wanted, have, strict=True)]
        shares = [this.share(engine) for engine in range(len(wanted))]
        assert [share.stop - share.start for share in shares] == needs
        assert this.num_prompts == sum(needs) > 0
        assert this.first_prompt == sum(earlier.num_prompts for earlier in rounds)
        assert this.number == len(rounds)
        rounds.append(this)
        found = [random.randint(0, need) for need in needs]
        for engine, count in enumerate(found):
            have[engine] += count
        return found

    assert sample_rounds(wanted, refills, sample).tolist() == have
    assert have == wanted or len(rounds) == refills + 1


def test_rounds_do_not_depend_on_the_number_of_engines() -> None:
    """Prompt i of all that are sampled teaches or not, whoever samples it."""
    teaches = np.random.default_rng(0).random(1000) < 0.4

    def kept(wanted: list[int]) -> tuple[list[int], list[int]]:
        chosen: list[int] = []
        sizes: list[int] = []

        def sample(this: SamplingRound) -> list[int]:
            sizes.append(this.num_prompts)
            counts = []
            for engine in range(len(wanted)):
                share = this.share(engine)
                sampled = this.first_prompt + np.arange(share.start, share.stop)
                mine = sampled[teaches[sampled]]
                chosen.extend(mine.tolist())
                counts.append(len(mine))
            return counts

        sample_rounds(wanted, 3, sample)
        return sorted(chosen), sizes

    assert kept([16]) == kept([8, 8]) == kept([5, 5, 6])


def test_a_draft_without_refills_hands_on_what_it_was_given() -> None:
    draft = BatchDraft(refills=False, fills_up=False)
    groups = make_groups([4, 5], [False, True])
    assert add(draft, groups) == 2
    assert draft.take(2) is groups


def test_a_draft_keeps_what_teaches_and_reports_all() -> None:
    draft = BatchDraft(refills=True, fills_up=False)
    assert add(draft, make_groups([0, 1, 2], [False, True, False])) == 1
    assert add(draft, SampledGroups.none(FORM, ("length",))) == 0
    assert add(draft, make_groups([7, 8], [True, False], version=2)) == 1
    taken = draft.take(2)
    expected = make_groups([1, 7], [True, True])
    assert taken.prompt_ids.tolist() == [1, 7]
    assert [prompt.tolist() for prompt in taken.prompts] == [[1, 1], [7, 7]]
    for name in ("prompt_index", "response_tokens", "response_offsets", "log_probs", "finished"):
        assert np.array_equal(getattr(taken.rollouts, name), getattr(expected.rollouts, name)), name
    assert taken.rewards.rewards.tolist() == expected.rewards.rewards.tolist()
    assert taken.advantages.tolist() == expected.advantages.tolist()
    report = draft.report(taken)
    assert report.table.group.tolist() == [1, 1, 1, 7, 7, 7]
    assert report.table.versions.tolist() == [1, 1, 1, 2, 2, 2]
    assert report.table.prompt_lengths.tolist() == [2] * 6
    sampled = [this.sampled.group[::SAMPLES].tolist() for this in report.rounds]
    assert sampled == [[0, 1, 2], [], [7, 8]]
    assert [this.groups_that_teach for this in report.rounds] == [1, 0, 1]
    # Responses 10 * id + 0..2 of prompts 0, 1, 2 in thousandths; the very first score is 0.
    parts = report.rounds[0].reward_parts
    assert parts["score"].total == pytest.approx(0.099) and parts["score"].count == 8
    assert parts["length"].total == pytest.approx(-0.099 / 8)


def test_fillers_come_behind_what_teaches() -> None:
    draft = BatchDraft(refills=True, fills_up=True)
    add(draft, make_groups([0, 1, 2], [False, True, False]))
    add(draft, make_groups([7, 8], [False, True]))
    assert draft.take(3).prompt_ids.tolist() == [1, 8, 0]


def test_nothing_teaches() -> None:
    draft = BatchDraft(refills=True, fills_up=False)
    assert add(draft, make_groups([0, 1], [False, False])) == 0
    nothing = draft.take(0)
    assert len(nothing) == 0 and len(draft.report(nothing).table) == 0
    info = RecordInfo("train", 1, 0, 0, 0, SAMPLES, VOCAB_SIZE, SamplingSettings(max_tokens=4), {})
    record = nothing.record(info)
    assert len(record) == 0
    assert record.prompt_tokens.dtype == np.int32 and record.prompt_offsets.tolist() == [0]


def test_no_groups_join_with_some() -> None:
    none, some = SampledGroups.none(FORM, ("length",)), make_groups([3], [True])
    joined = SampledGroups.join([none, some])
    for field in dataclasses.fields(Rollouts):
        if field.name not in ("topk", "generation_s"):
            assert np.array_equal(
                getattr(joined.rollouts, field.name), getattr(some.rollouts, field.name)
            ), field.name
    assert joined.rewards.terms["length"].tolist() == some.rewards.terms["length"].tolist()
    assert len(none.table()) == 0 and none.table().in_loss.dtype == np.bool_
