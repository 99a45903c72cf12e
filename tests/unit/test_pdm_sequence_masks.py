# SPDX-License-Identifier: Apache-2.0
"""Sequence masks against a plain loop over sequences and tokens, and hand-worked numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdm import MaskResult
from pdm.functional.sequence_acceptance import (
    SequenceMaskResult,
    acceptance_by_length,
    expand_to_tokens,
)
from pdm.functional.sequence_mask_config import SequenceMaskConfig, sequence_mask
from pdm.functional.sequence_masks import ln_trm_mask, sampled_trm_mask, ser_mask, trm_mask

INF, NAN = math.inf, math.nan
MAX, AVERAGE, RATIO = 0.5, 0.12, 0.25
LN_KL, LN_TV = 0.02, 0.03


# --- The oracle: lists of floats, one sequence at a time


@dataclass(frozen=True, eq=False)
class Batch:
    """A packed batch whose sequences interleave, some of them empty, some rows not trained on."""

    ids: Tensor
    num_sequences: int
    behavior: Tensor
    policy: Tensor
    divergence: Tensor
    trained: Tensor

    def rows_of(self, sequence: int) -> list[int]:
        return [
            row
            for row in range(self.ids.numel())
            if self.ids[row] == sequence and self.trained[row]
        ]

    def statistics(self, sequence: int) -> dict[str, float]:
        rows = self.rows_of(sequence)
        n = len(rows)
        log_rho = [(self.policy[row] - self.behavior[row]).item() for row in rows]
        divergence = [self.divergence[row].item() for row in rows]
        weights = []
        for t in range(1, n + 1):
            weights.append(min(1.0, (n - t) * LN_TV, math.sqrt((n - t) * LN_KL / 2)))
        excess = [abs(math.exp(x) - 1) for x in log_rho]
        norm = sum(weights)
        w = sum(e * weight for e, weight in zip(excess, weights, strict=True))
        return {
            "max": max(divergence, default=0.0) / MAX,
            "average": (sum(divergence) / n if n else 0.0) / AVERAGE,
            "k2_max": max((0.5 * x * x for x in log_rho), default=0.0) / MAX,
            "k3_average": (sum(math.exp(x) - 1 - x for x in log_rho) / n if n else 0.0) / AVERAGE,
            "ln_trm": (w / norm if norm else 0.0) / RATIO,
            "ser": (sum(excess) / n if n else 0.0) / RATIO,
        }


def random_batch(seed: int, num_sequences: int = 12, max_length: int = 40) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max_length + 1, (num_sequences,), generator=generator)
    lengths[seed % num_sequences] = 0
    lengths[(seed + 1) % num_sequences] = 1
    ids = torch.repeat_interleave(torch.arange(num_sequences), lengths)
    ids = ids[torch.randperm(ids.numel(), generator=generator)]

    def rand() -> Tensor:
        return torch.rand(ids.numel(), generator=generator, dtype=torch.float64)

    # Sequences at very different distances, so that some pass and some do not.
    scale = torch.rand(num_sequences, generator=generator, dtype=torch.float64)[ids]
    behavior = -3 * rand()
    policy = (behavior + 3.0 * scale * (rand() - 0.5)).clamp(max=0.0)
    divergence = 0.7 * scale * rand()
    return Batch(ids, num_sequences, behavior, policy, divergence, rand() < 0.9)


def run_all(batch: Batch, order: Tensor | None = None) -> dict[str, SequenceMaskResult]:
    if order is None:
        order = torch.arange(batch.ids.numel())
    index = (batch.ids[order], batch.num_sequences)
    d, trained = batch.divergence[order], batch.trained[order]
    both = (batch.behavior[order], batch.policy[order])
    return {
        "max": trm_mask(d, *index, max_threshold=MAX, trained=trained),
        "average": trm_mask(d, *index, average_threshold=AVERAGE, trained=trained),
        "k2_max": sampled_trm_mask(*both, *index, max_threshold=MAX, trained=trained),
        "k3_average": sampled_trm_mask(*both, *index, average_threshold=AVERAGE, trained=trained),
        "ln_trm": ln_trm_mask(
            *both, *index, threshold=RATIO, kl_max=LN_KL, tv_max=LN_TV, trained=trained
        ),
        "ser": ser_mask(*both, *index, threshold=RATIO, trained=trained),
    }


@pytest.mark.parametrize("seed", range(8))
def test_every_criterion_is_the_plain_loop(seed: int) -> None:
    batch = random_batch(seed)
    for name, result in run_all(batch).items():
        expected = [batch.statistics(b)[name] for b in range(batch.num_sequences)]
        assert result.score.dtype == torch.float64
        assert result.score.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15), name
        assert result.accept.tolist() == [score <= 1.0 for score in expected], name
        lengths = [len(batch.rows_of(b)) for b in range(batch.num_sequences)]
        assert result.lengths.tolist() == lengths
        assert not result.invalid.any()
        assert result.accept.dtype == result.invalid.dtype == torch.bool


def test_the_batches_of_the_oracle_divide_every_criterion() -> None:
    results = [run_all(random_batch(seed)) for seed in range(8)]
    for name in results[0]:
        verdicts = torch.cat([result[name].accept for result in results])
        assert 0.1 < verdicts.double().mean() < 0.95, name


def test_combined_needs_both() -> None:
    batch = random_batch(3)
    index = (batch.ids, batch.num_sequences)
    both = {"max_threshold": MAX, "average_threshold": AVERAGE}
    each = run_all(batch)
    combined = trm_mask(batch.divergence, *index, **both, trained=batch.trained)
    assert torch.equal(combined.accept, each["max"].accept & each["average"].accept)
    assert torch.equal(combined.score, torch.maximum(each["max"].score, each["average"].score))
    sampled = sampled_trm_mask(batch.behavior, batch.policy, *index, **both, trained=batch.trained)
    assert torch.equal(sampled.accept, each["k2_max"].accept & each["k3_average"].accept)
    # KL and TV together: `&`, whatever they are made of.
    anded = combined & each["ser"]
    assert torch.equal(anded.accept, combined.accept & each["ser"].accept)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_results_do_not_depend_on_how_sequences_interleave(seed: int) -> None:
    batch = random_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    anyhow = torch.randperm(batch.ids.numel(), generator=generator)
    # LN-TRM weighs by position: there, any order that keeps each sequence's own.
    together = torch.argsort(batch.ids, stable=True)
    first = run_all(batch)
    for name, result in run_all(batch, together).items():
        assert torch.equal(result.accept, first[name].accept), name
        torch.testing.assert_close(result.score, first[name].score, rtol=1e-12, atol=0)
    for name, result in run_all(batch, anyhow).items():
        if name != "ln_trm":
            torch.testing.assert_close(result.score, first[name].score, rtol=1e-12, atol=0)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(1.0, 3.0))
def test_a_looser_threshold_accepts_more(seed: int, factor: float) -> None:
    batch = random_batch(seed)
    index = (batch.ids, batch.num_sequences)
    both = (batch.behavior, batch.policy)
    masks: list[Callable[[float], SequenceMaskResult]] = [
        lambda x: trm_mask(batch.divergence, *index, max_threshold=x),
        lambda x: trm_mask(batch.divergence, *index, average_threshold=x),
        lambda x: sampled_trm_mask(*both, *index, max_threshold=x, average_threshold=x),
        lambda x: ln_trm_mask(*both, *index, threshold=x, kl_max=LN_KL),
        lambda x: ser_mask(*both, *index, threshold=x),
    ]
    for mask in masks:
        tight, loose = mask(0.2), mask(0.2 * factor)
        assert (loose.accept | ~tight.accept).all()
        assert (loose.score <= tight.score).all()
        assert (tight.score >= 0).all()


# --- Hand-worked


def ids_of(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def test_max_average_and_tie_by_hand() -> None:
    divergence = torch.tensor([0.1, 0.3, 0.2, 0.0, 0.6, 0.15])
    index = (ids_of(2, 3, 1), 3)
    threshold = 0.3
    worst = trm_mask(divergence, *index, max_threshold=threshold)
    assert worst.accept.tolist() == [True, False, True]  # 0.3 in float32 is its threshold: inside
    assert worst.score.tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert worst.score.dtype == torch.float32
    mean = trm_mask(divergence, *index, average_threshold=0.2)
    assert mean.score.tolist() == pytest.approx([1.0, 0.8 / 3 / 0.2, 0.75])
    assert mean.accept.tolist() == [True, False, True]
    assert mean.acceptance_rate.item() == pytest.approx(2 / 3)
    assert (mean.num_accepted.item(), mean.num_scored.item()) == (2, 3)


def test_sampled_estimators_by_hand() -> None:
    # rho = 2 and 1/2: k2 = log(2)^2 / 2 for both, k3 = 1 - log 2 and log 2 - 1/2.
    log2 = math.log(2)
    behavior = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    policy = behavior + torch.tensor([log2, -log2], dtype=torch.float64)
    index = (ids_of(1, 1), 2)
    k2 = sampled_trm_mask(behavior, policy, *index, max_threshold=1.0)
    assert k2.score.tolist() == pytest.approx([0.5 * log2**2] * 2, rel=1e-15)
    k3 = sampled_trm_mask(behavior, policy, *index, average_threshold=1.0)
    assert k3.score.tolist() == pytest.approx([1 - log2, log2 - 0.5], rel=1e-14)


def test_k3_is_an_unbiased_estimate_of_the_kl() -> None:
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    pi = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    k3 = sampled_trm_mask(mu.log(), pi.log(), torch.arange(3), 3, average_threshold=1.0).score
    kl = (mu * (mu / pi).log()).sum()
    torch.testing.assert_close((mu * k3).sum(), kl)


def test_ln_trm_by_hand() -> None:
    # T = 3, d = 0.08, e = 0.1: w = (min(0.2, sqrt(0.08)), min(0.1, 0.2), 0) = (0.2, 0.1, 0).
    behavior = torch.full((3,), -1.0, dtype=torch.float64)
    rho = torch.tensor([1.3, 0.4, 9.0], dtype=torch.float64)
    policy = behavior + rho.log()
    index = (ids_of(3), 1)
    settings_ = {"threshold": 0.4, "kl_max": 0.08, "tv_max": 0.1}
    result = ln_trm_mask(behavior, policy, *index, **settings_)
    assert result.score.item() == pytest.approx((0.3 * 0.2 + 0.6 * 0.1) / 0.3 / 0.4)  # 1
    assert ln_trm_mask(behavior, policy, *index, **{**settings_, "threshold": 0.41}).accept.all()
    assert not ln_trm_mask(
        behavior, policy, *index, **{**settings_, "threshold": 0.39}
    ).accept.any()
    # By Pinsker alone: w = (sqrt(0.08), 0.2, 0).
    pinsker = ln_trm_mask(behavior, policy, *index, threshold=1.0, kl_max=0.08)
    root = math.sqrt(0.08)
    assert pinsker.score.item() == pytest.approx((0.3 * root + 0.6 * 0.2) / (root + 0.2))


def test_ln_trm_edges() -> None:
    zero = torch.zeros(1)

    def mask(log_rho: list[float], *lengths: int) -> SequenceMaskResult:
        policy = torch.tensor(log_rho)
        behavior = torch.zeros_like(policy)
        return ln_trm_mask(
            behavior, policy, ids_of(*lengths), len(lengths), threshold=0.1, kl_max=0.1
        )

    # T = 1: Z = 0, accepted whatever its finite ratio. The last token of any has no weight.
    assert mask([-5.0], 1).accept.all() and mask([-5.0], 1).score.item() == 0.0
    assert mask([0.0, 0.0, -9.0], 3).accept.all()
    assert not mask([0.0, -9.0, 0.0], 3).accept.any()
    # A ratio that is infinite or NaN cannot be trained on, at the last token neither.
    infinite = ln_trm_mask(-INF + zero, -1 + zero, ids_of(1), 1, threshold=0.1, kl_max=0.1)
    assert not infinite.accept.any() and infinite.score.item() == INF
    assert mask([0.0, NAN, 0.0], 2, 1).accept.tolist() == [False, True]
    assert mask([0.0, NAN, 0.0], 2, 1).invalid.tolist() == [True, False]
    # w_t = 1 far from the end: LN-TRM is SER but for the tail.
    batch = random_batch(5)
    index = (batch.ids, batch.num_sequences)
    both = (batch.behavior, batch.policy)
    flat = ln_trm_mask(*both, *index, threshold=RATIO, kl_max=1e9)
    zeroed = batch.policy.clone()
    shortened = []
    for b in range(batch.num_sequences):
        rows = (batch.ids == b).nonzero().flatten().tolist()
        excess = [abs(math.exp((zeroed[r] - batch.behavior[r]).item()) - 1) for r in rows[:-1]]
        shortened.append(sum(excess) / len(excess) / RATIO if excess else 0.0)
    assert flat.score.tolist() == pytest.approx(shortened)


def test_ser_by_hand() -> None:
    behavior = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    policy = behavior + torch.tensor([1.1, 0.9, 1.0, 2.0]).log()
    result = ser_mask(behavior, policy, ids_of(3, 1), 2, threshold=0.1)
    assert result.score.tolist() == pytest.approx([0.2 / 3 / 0.1, 10.0], rel=1e-5)
    assert result.accept.tolist() == [True, False]


def test_proposition_3_10_the_average_does_not_see_one_bad_token() -> None:
    # One token of KL 1 among 10,000: mean 1e-4.
    divergence = torch.zeros(10_000)
    divergence[1234] = 1.0
    index = (torch.zeros(10_000, dtype=torch.int64), 1)
    assert trm_mask(divergence, *index, average_threshold=1e-3).accept.all()
    assert not trm_mask(divergence, *index, max_threshold=1e-3).accept.any()
    combined = trm_mask(divergence, *index, max_threshold=1e-3, average_threshold=1e-3)
    assert not combined.accept.any() and combined.score.item() == pytest.approx(1000.0)


def test_max_rejects_long_sequences_more_and_the_counts_show_it() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1] * 400 + [10] * 400 + [100] * 400
    ids = ids_of(*lengths)
    bad = torch.rand(ids.numel(), generator=generator) < 0.02
    result = trm_mask(bad.float(), ids, len(lengths), max_threshold=0.5)
    counts = acceptance_by_length(result, (1, 10))
    assert counts.total.tolist() == [400, 400, 400]
    expected = [0.98, 0.98**10, 0.98**100]  # Appendix F.1
    assert counts.acceptance_rate.tolist() == pytest.approx(expected, abs=0.06)
    assert counts.accepted.sum() == result.num_accepted


def test_length_buckets_by_hand() -> None:
    result = SequenceMaskResult(
        accept=torch.tensor([True, True, False, True, False]),
        score=torch.zeros(5),
        lengths=torch.tensor([0, 4, 5, 8, 9]),
        invalid=torch.zeros(5, dtype=torch.bool),
    )
    counts = acceptance_by_length(result, (4, 8))
    assert counts.upper_edges == (4, 8)
    assert counts.total.tolist() == [1, 2, 1] and counts.accepted.tolist() == [1, 1, 0]
    assert acceptance_by_length(result, ()).total.tolist() == [4]
    assert acceptance_by_length(result, (1, 4, 8, 20)).acceptance_rate[0].isnan()
    for edges in ((8, 4), (4, 4), (0, 4), (-1,), (4.0,), (True,)):
        with pytest.raises(ValueError, match="positive integers in rising order"):
            acceptance_by_length(result, edges)


# --- Garbage, infinities, nothing


@pytest.mark.parametrize("garbage", [NAN, -INF])
def test_garbage_rejects_its_own_sequence_and_says_so(garbage: float) -> None:
    divergence = torch.tensor([0.1, 0.1, garbage, 0.1, 0.1])
    for thresholds in (
        {"max_threshold": 9.0},
        {"average_threshold": 9.0},
        {"max_threshold": 9.0, "average_threshold": 9.0},
    ):
        for place in range(5):
            moved = divergence.roll(place - 2)
            result = trm_mask(moved, ids_of(2, 2, 1), 3, **thresholds)
            hit = [0, 0, 1, 1, 2][place]
            assert result.accept.tolist() == [b != hit for b in range(3)]
            assert result.invalid.tolist() == [b == hit for b in range(3)]
            assert result.score.isnan().tolist() == [b == hit for b in range(3)]


def test_infinities_reject_without_being_garbage() -> None:
    index = (ids_of(2, 1), 2)
    divergence = torch.tensor([0.0, INF, 0.0])
    for thresholds in ({"max_threshold": 9.0}, {"average_threshold": 9.0}):
        result = trm_mask(divergence, *index, **thresholds)
        assert result.accept.tolist() == [False, True] and not result.invalid.any()
        assert result.score.tolist() == [INF, 0.0]
    fine = torch.tensor([-1.0, -1.0, -1.0])
    impossible = torch.tensor([-1.0, -INF, -1.0])
    for behavior, policy in ((fine, impossible), (impossible, fine)):
        for thresholds in ({"max_threshold": 9.0}, {"average_threshold": 9.0}):
            result = sampled_trm_mask(behavior, policy, *index, **thresholds)
            assert result.accept.tolist() == [False, True] and not result.invalid.any()
            assert result.score.tolist() == [INF, 0.0]
    assert ser_mask(impossible, fine, *index, threshold=9.0).score.tolist() == [INF, 0.0]
    ruled_out = ser_mask(fine, impossible, *index, threshold=1.0)  # |rho - 1| = 1 of two tokens
    assert ruled_out.score.tolist() == [0.5, 0.0]
    both = sampled_trm_mask(impossible, impossible, *index, max_threshold=9.0)
    assert both.invalid.tolist() == [True, False] and both.accept.tolist() == [False, True]
    # A float32 ratio of exp(100) overflows; rejected all the same, and not garbage.
    huge = ser_mask(fine - 99, fine, *index, threshold=9.0)
    assert not huge.accept.any() and not huge.invalid.any()


def test_a_negative_divergence_does_not_pay_for_another_token() -> None:
    divergence = torch.tensor([-5.0, 0.4])
    assert not trm_mask(divergence, ids_of(2), 1, average_threshold=0.1).accept.any()


def test_rows_that_are_not_trained_may_hold_anything() -> None:
    trained = torch.tensor([False, True, True, False, True, False])
    ids = torch.tensor([-7, 0, 0, 99, 1, 1])
    divergence = torch.tensor([NAN, 0.1, 0.2, INF, 0.9, NAN], dtype=torch.float64)
    for thresholds in ({"max_threshold": 0.5}, {"average_threshold": 0.5}):
        result = trm_mask(divergence, ids, 3, **thresholds, trained=trained)
        assert result.accept.tolist() == [True, False, True]
        assert result.lengths.tolist() == [2, 1, 0] and not result.invalid.any()
    behavior = torch.tensor([NAN, -1.0, -1.0, INF, -1.0, NAN])
    for ratio_mask in (
        ser_mask(behavior, behavior, ids, 3, threshold=0.1, trained=trained),
        ln_trm_mask(behavior, behavior, ids, 3, threshold=0.1, kl_max=0.1, trained=trained),
    ):
        assert ratio_mask.accept.all() and ratio_mask.score.tolist() == [0.0, 0.0, 0.0]
    keep = expand_to_tokens(result.accept, ids, trained=trained)
    assert keep.tolist() == [True, True, True, True, False, True]


def test_empty_sequences_empty_batches_and_all_rejected() -> None:
    one = torch.ones(2)
    empty = torch.zeros(0)
    none = torch.zeros(0, dtype=torch.int64)

    def masks(values: Tensor, ids: Tensor, count: int) -> list[SequenceMaskResult]:
        both = (values - 1, -2 * values)
        return [
            trm_mask(values, ids, count, max_threshold=0.5),
            trm_mask(values, ids, count, average_threshold=0.5),
            sampled_trm_mask(*both, ids, count, max_threshold=0.5, average_threshold=0.5),
            ln_trm_mask(*both, ids, count, threshold=0.5, kl_max=0.1),
            ser_mask(*both, ids, count, threshold=0.5),
        ]

    for result in masks(empty, none, 0):
        assert result.accept.shape == result.score.shape == result.lengths.shape == (0,)
        assert result.acceptance_rate.isnan() and result.num_scored.item() == 0
        assert acceptance_by_length(result, (5,)).total.tolist() == [0, 0]
        assert expand_to_tokens(result.accept, none).shape == (0,)
    for result in masks(empty, none, 2):
        assert result.accept.tolist() == [True, True] and result.score.tolist() == [0.0, 0.0]
        assert result.acceptance_rate.isnan()
    for result in masks(one, torch.tensor([2, 2]), 4):
        assert result.accept.tolist() == [True, True, False, True]
        assert (result.num_accepted.item(), result.num_scored.item()) == (0, 1)
        assert result.acceptance_rate.item() == 0.0
        assert not expand_to_tokens(result.accept, torch.tensor([2, 2])).any()


# --- Shapes, dtypes, composition


def test_composes_with_a_token_mask() -> None:
    ids = torch.tensor([1, 0, 1, 0])
    result = trm_mask(torch.tensor([0.9, 0.1, 0.1, 0.1]), ids, 2, max_threshold=0.5)
    token = MaskResult.from_criteria(
        outside=torch.tensor([False, True, False, False]), outward=torch.ones(4, dtype=torch.bool)
    )
    keep = token.keep & expand_to_tokens(result.accept, ids)
    assert keep.tolist() == [False, False, False, True]


def test_any_leading_shape_and_integer_dtype() -> None:
    batch = random_batch(2)
    rows = batch.ids.numel() // 2 * 2
    ids, d = batch.ids[:rows], batch.divergence[:rows]
    flat = trm_mask(d, ids, batch.num_sequences, average_threshold=AVERAGE)
    square = trm_mask(
        d.view(2, -1), ids.view(2, -1).int(), batch.num_sequences, average_threshold=AVERAGE
    )
    assert torch.equal(flat.score, square.score)
    assert expand_to_tokens(flat.accept, ids.view(2, -1)).shape == (2, rows // 2)


def test_inputs_stay_as_they_were_and_nothing_carries_a_gradient() -> None:
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-1.5, NAN], dtype=torch.float32)
    before = behavior.clone()
    for result in (
        trm_mask(policy.square(), ids_of(1, 1), 2, max_threshold=1.0),
        sampled_trm_mask(behavior, policy, ids_of(1, 1), 2, average_threshold=1.0),
        ln_trm_mask(behavior, policy, ids_of(1, 1), 2, threshold=1.0, kl_max=0.1),
        ser_mask(behavior, policy, ids_of(1, 1), 2, threshold=1.0),
    ):
        assert not result.score.requires_grad
        assert result.score.dtype == torch.float64  # the wider of the two
    assert torch.equal(behavior.isnan(), before.isnan()) and behavior[0] == before[0]


def test_half_precision_input_is_summed_in_float64() -> None:
    divergence = torch.full((4096,), 1e-2, dtype=torch.bfloat16)
    result = trm_mask(divergence, torch.zeros(4096).long(), 1, average_threshold=1.0)
    assert result.score.dtype == torch.float32
    assert result.score.item() == pytest.approx(divergence[0].item(), rel=1e-6)


def test_errors_say_what_arrived() -> None:
    d = torch.ones(3)
    ids = torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="give max_threshold, average_threshold or both"):
        trm_mask(d, ids, 2)
    for threshold in (0.0, -1.0, NAN, INF):
        with pytest.raises(ValueError, match="max_threshold must be finite and above 0"):
            trm_mask(d, ids, 2, max_threshold=threshold)
        with pytest.raises(ValueError, match="ser_mask: threshold must be finite and above 0"):
            ser_mask(d, d, ids, 2, threshold=threshold)
        with pytest.raises(ValueError, match="tv_max must be finite and above 0"):
            ln_trm_mask(d, d, ids, 2, threshold=1.0, kl_max=1.0, tv_max=threshold)
    with pytest.raises(ValueError, match=r"divergence must be floating and of shape \(3,\)"):
        trm_mask(d[:2], ids, 2, max_threshold=1.0)
    with pytest.raises(ValueError, match="policy_log_prob must be floating"):
        ser_mask(d, ids, ids, 2, threshold=1.0)
    with pytest.raises(ValueError, match=r"sequence_ids must be in 0 \.\. .* from 0 to 1"):
        trm_mask(d, ids, 1, max_threshold=1.0)
    with pytest.raises(ValueError, match="from -1 to 0"):
        trm_mask(d, ids - 1, 2, max_threshold=1.0)
    with pytest.raises(ValueError, match=r"sequence_ids must be integers, got torch\.float32"):
        trm_mask(d, d, 2, max_threshold=1.0)
    with pytest.raises(ValueError, match="num_sequences must be an integer >= 0, got -1"):
        trm_mask(d, ids, -1, max_threshold=1.0)
    with pytest.raises(ValueError, match="trained must be bool of shape"):
        trm_mask(d, ids, 2, max_threshold=1.0, trained=torch.ones(3))
    with pytest.raises(ValueError, match=r"accept must be bool \[B\]"):
        expand_to_tokens(d, ids)
    with pytest.raises(ValueError, match="sequence_ids must be in"):
        expand_to_tokens(torch.ones(1, dtype=torch.bool), ids)
    with pytest.raises(ValueError, match="same sequences"):
        _ = trm_mask(d, ids, 2, max_threshold=1.0) & trm_mask(d, ids, 3, max_threshold=1.0)


# --- The configuration


CONFIGS = {
    "max": SequenceMaskConfig("max", divergence="topk_kl", max_threshold=MAX),
    "average": SequenceMaskConfig("average", divergence="full_kl", average_threshold=AVERAGE),
    "k2_max": SequenceMaskConfig("max", divergence="sampled", max_threshold=MAX),
    "k3_average": SequenceMaskConfig("average", divergence="sampled", average_threshold=AVERAGE),
    "ln_trm": SequenceMaskConfig("ln_trm", ratio_threshold=RATIO, kl_max=LN_KL, tv_max=LN_TV),
    "ser": SequenceMaskConfig("ser", ratio_threshold=RATIO),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_chooses_its_mask(name: str) -> None:
    batch = random_batch(4)
    result = sequence_mask(
        CONFIGS[name],
        batch.ids,
        batch.num_sequences,
        behavior_log_prob=batch.behavior,
        policy_log_prob=batch.policy,
        divergence=batch.divergence,
        trained=batch.trained,
    )
    expected = run_all(batch)[name]
    assert torch.equal(result.score, expected.score)
    assert torch.equal(result.accept, expected.accept)


def test_the_config_adds_a_limit_on_the_total_variation() -> None:
    config = SequenceMaskConfig(
        "combined",
        divergence="topk_kl",
        max_threshold=MAX,
        average_threshold=AVERAGE,
        tv_max_threshold=0.3,
    )
    assert config.needs_tv and config.needs_divergence
    batch = random_batch(6)
    index = (batch.ids, batch.num_sequences)
    tv = (batch.divergence / 2).sqrt()
    result = sequence_mask(config, *index, divergence=batch.divergence, tv=tv)
    kl = trm_mask(batch.divergence, *index, max_threshold=MAX, average_threshold=AVERAGE)
    by_tv = trm_mask(tv, *index, max_threshold=0.3)
    assert torch.equal(result.accept, kl.accept & by_tv.accept)
    assert (kl.accept & ~by_tv.accept).any()
    with pytest.raises(ValueError, match="needs tv, got None"):
        sequence_mask(config, *index, divergence=batch.divergence)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"criterion": "median"}, r"criterion must be one of .* got 'median'"),
        ({"criterion": "max"}, "criterion='max' needs divergence"),
        ({"criterion": "max", "divergence": "topk_kl"}, "criterion='max' needs max_threshold"),
        (
            {"criterion": "combined", "divergence": "topk_kl", "max_threshold": 1.0},
            "criterion='combined' needs average_threshold",
        ),
        (
            {"criterion": "max", "divergence": "binary", "max_threshold": 1.0},
            r"divergence must be one of .* got 'binary'",
        ),
        (
            {
                "criterion": "max",
                "divergence": "topk_kl",
                "max_threshold": 1.0,
                "average_threshold": 1.0,
            },
            "average_threshold=1.0 has no effect with criterion='max'",
        ),
        (
            {"criterion": "ser", "ratio_threshold": 1.0, "kl_max": 1.0},
            "kl_max=1.0 has no effect",
        ),
        (
            {"criterion": "ser", "ratio_threshold": 1.0, "divergence": "topk_kl"},
            "divergence='topk_kl' has no effect",
        ),
        ({"criterion": "ln_trm", "ratio_threshold": 1.0}, "criterion='ln_trm' needs kl_max"),
        (
            {"criterion": "max", "divergence": "topk_kl", "max_threshold": 0.0},
            "max_threshold must be a finite number above 0, got 0.0",
        ),
        (
            {"criterion": "max", "divergence": "topk_kl", "max_threshold": NAN},
            "max_threshold must be a finite number above 0, got nan",
        ),
        ({"criterion": "ser", "ratio_threshold": "0.1"}, "ratio_threshold must be a finite"),
        ({"criterion": "ser", "ratio_threshold": True}, "ratio_threshold must be a finite"),
        (
            {
                "criterion": "max",
                "divergence": "topk_tv",
                "max_threshold": 0.1,
                "tv_max_threshold": 0.1,
            },
            "tv_max_threshold goes with divergence 'topk_kl' or 'full_kl', got .*'topk_tv'",
        ),
    ],
)
def test_settings_without_meaning_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceMaskConfig(**settings_)


def test_a_tensor_that_the_criterion_needs_is_asked_for() -> None:
    ids, one = torch.tensor([0]), torch.tensor([-1.0])
    with pytest.raises(ValueError, match=r"criterion='max' .* needs divergence, got None"):
        sequence_mask(CONFIGS["max"], ids, 1, behavior_log_prob=one, policy_log_prob=one)
    with pytest.raises(ValueError, match="needs policy_log_prob, got None"):
        sequence_mask(CONFIGS["ser"], ids, 1, behavior_log_prob=one)
