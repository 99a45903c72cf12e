# SPDX-License-Identifier: Apache-2.0
"""The bounds against the paper's printed numbers, and against exactly enumerated policy pairs."""

import itertools
import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdm.functional.error_bounds import (
    ErrorBounds,
    accepted_error_bound,
    context_shift,
    error_bounds,
)

T, KL_MAX, KL_SEQ = 4096, 1e-4, 0.01
TV_MAX, TV_SEQ = 5e-3, 0.05
PRECONDITION_FREE = ("precondition_free", "precondition_free_improvement")
NAMES = [field.name for field in fields(ErrorBounds) if field.name not in PRECONDITION_FREE]


def values(bounds: ErrorBounds) -> dict[str, float]:
    return {name: getattr(bounds, name).item() for name in NAMES}


# --- The paper's numbers


# Printed digits of Table 1. "35.0" for the two Pinsker-marginal sums is their closed form
# (4/3) T^1.5 d = 34.953; the sum itself is 34.946, see the next test.
TABLE_1 = {
    "classical": ("1677", "839"),
    "coupling": ("113.8", "79.9"),
    "pinsker_marginal_kl": ("34.9", "34.9"),
    "pinsker_marginal_tv": ("34.9", "24.7"),
    "mixed_kl": ("8.2", "8.2"),
    "mixed_tv": ("8.2", "4.1"),
    "unified": ("8.2", "4.1"),
}


@pytest.mark.parametrize("column", [0, 1], ids=["KL-only", "KL+TV"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_table_1(column: int, by_hand: bool) -> None:
    tv = (TV_MAX, TV_SEQ) if column else (None, None)
    if by_hand and not column:  # Pinsker by the caller is Pinsker by None
        tv = (math.sqrt(KL_MAX / 2), math.sqrt(KL_SEQ / 2))
        assert f"{tv[0]:.3g}" == "0.00707" and f"{tv[1]:.3g}" == "0.0707"
    bounds = values(error_bounds(T, KL_MAX, tv[0], KL_SEQ, tv[1]))
    for name, printed in TABLE_1.items():
        digits = 0 if name == "classical" else 1
        assert f"{bounds[name]:.{digits}f}" == printed[column], name
    # The last rows but one: "<= 35.0" and "<= 24.7".
    assert bounds["adaptive"] <= (34.947, 24.711)[column]


def test_pinsker_marginal_sum_and_closed_form() -> None:
    bounds = error_bounds(T, KL_MAX, TV_MAX, KL_SEQ, TV_SEQ)
    assert bounds.pinsker_marginal_kl.item() == pytest.approx(34.946, abs=5e-4)
    closed = 4 / 3 * T**1.5 * KL_MAX
    assert f"{closed:.2f}" == "34.95" and f"{closed:.1f}" == "35.0"
    assert bounds.pinsker_marginal_kl.item() < closed  # the closed form is the integral above it
    closed_tv = 8 / 3 * T**1.5 * TV_MAX * math.sqrt(KL_MAX / 2)
    assert f"{closed_tv:.1f}" == f"{bounds.pinsker_marginal_tv.item():.1f}" == "24.7"


def test_improvement_over_the_classical_bound() -> None:
    # Section 4.4: classical from the KL alone, unified from both. 1677 / 4.1 = 409.
    classical = error_bounds(T, KL_MAX, None, KL_SEQ, None).classical.item()
    unified = error_bounds(T, KL_MAX, TV_MAX, KL_SEQ, TV_SEQ).unified.item()
    assert classical == pytest.approx(1677.312)
    assert unified == pytest.approx(4.096)
    assert int(classical / unified) == 409


def test_where_the_coupling_cap_sets_in() -> None:
    # Appendix C.3: at t = 142 for e = 7.07e-3, and the capped sum is about 4024.
    tv = torch.tensor(KL_MAX / 2, dtype=torch.float64).sqrt()
    shift = context_shift(torch.arange(T), None, tv)
    assert (shift < 1).sum().item() == 142
    assert int(shift.sum()) == 4024


# --- Structure


def test_by_hand_at_three_tokens() -> None:
    mean_tv = torch.tensor([0.1, 0.05, 0.2], dtype=torch.float64)
    bounds = values(error_bounds(3, 0.08, 0.15, 0.02, 0.3, mean_tv))
    root = math.sqrt(0.04)  # sqrt(d / 2)
    assert bounds == pytest.approx(
        {
            "classical": 12 * 0.15**2,
            "coupling": 4 * 0.15 * (0 + 0.15 + 0.3),
            "pinsker_marginal_kl": 4 * root * (0 + root + math.sqrt(0.08)),
            "pinsker_marginal_tv": 4 * 0.15 * (0 + root + math.sqrt(0.08)),
            "mixed_kl": 12 * root * 0.1,
            "mixed_tv": 12 * 0.15 * 0.3,
            # two, one and no tokens after
            "adaptive_kl": 4 * (0.1 * math.sqrt(0.08) + 0.05 * root),
            "adaptive_tv": 4 * (0.1 * 0.3 + 0.05 * 0.15),
            "adaptive": 4 * (0.1 * math.sqrt(0.08) + 0.05 * 0.15),
            "unified": 4 * (0.1 * math.sqrt(0.08) + 0.05 * 0.15),
        }
    )


# Zero or a size whose square is not lost: products of denormals obey no inequality to 1e-12.
kls = st.just(0.0) | st.floats(1e-9, 8.0)
tvs = st.just(0.0) | st.floats(1e-9, 1.0)
horizons = st.integers(0, 40)
few = settings(max_examples=40, deadline=None, derandomize=True)


@few
@given(horizons, kls, tvs, kls, tvs, st.integers(0, 10**6))
def test_adaptive_bounds_are_below_their_parents(
    horizon: int, kl: float, tv: float, kl_seq: float, tv_seq: float, seed: int
) -> None:
    worst = min(1.0, tv, math.sqrt(kl / 2))
    generator = torch.Generator().manual_seed(seed)
    mean_tv = worst * torch.rand(horizon, generator=generator, dtype=torch.float64)
    b = values(error_bounds(horizon, kl, tv, kl_seq, tv_seq, mean_tv))
    slack = 1.0 + 1e-12
    assert b["adaptive_kl"] <= slack * min(b["pinsker_marginal_kl"], b["pinsker_marginal_tv"])
    assert b["adaptive_tv"] <= slack * b["coupling"] <= slack**2 * b["classical"]
    assert b["adaptive"] <= slack * min(b["adaptive_kl"], b["adaptive_tv"])
    assert b["unified"] == min(b.values())
    assert b["unified"] == pytest.approx(
        min(b["mixed_kl"], b["mixed_tv"], b["adaptive"]), rel=1e-12
    )


@few
@given(horizons, kls, st.just(0.0) | st.floats(1e-9, 1.5))
def test_worst_case_substitution_gives_back_the_parents(horizon: int, kl: float, tv: float) -> None:
    def substitute(worst: float) -> dict[str, float]:
        mean_tv = torch.full((horizon,), worst, dtype=torch.float64)
        return values(error_bounds(horizon, kl, tv, 0.1, 0.1, mean_tv))

    by_kl = substitute(min(1.0, math.sqrt(kl / 2)))
    assert by_kl["adaptive_kl"] == pytest.approx(by_kl["pinsker_marginal_kl"], rel=1e-12)
    by_tv = substitute(tv)
    assert by_tv["adaptive_tv"] == pytest.approx(by_tv["coupling"], rel=1e-12)
    assert by_tv["adaptive_kl"] == pytest.approx(by_tv["pinsker_marginal_tv"], rel=1e-12)
    # Without means, the best of both.
    b = values(error_bounds(horizon, kl, tv, 0.1, 0.1))
    assert b["adaptive_kl"] == pytest.approx(
        min(b["pinsker_marginal_kl"], b["pinsker_marginal_tv"]), rel=1e-12
    )
    assert b["adaptive_tv"] <= b["coupling"] * (1 + 1e-12)


@few
@given(horizons, kls, kls)
def test_tight_pinsker_makes_tv_bounds_their_kl_twins(
    horizon: int, kl: float, kl_seq: float
) -> None:
    b = values(error_bounds(horizon, kl, None, kl_seq, None))
    assert b["mixed_tv"] == pytest.approx(b["mixed_kl"])
    assert b["pinsker_marginal_tv"] == pytest.approx(b["pinsker_marginal_kl"])
    # From one step on, sqrt(n d/2) <= n sqrt(d/2): the hybrid is the KL route (D.6).
    assert b["adaptive"] == pytest.approx(b["adaptive_kl"])


def test_the_hybrid_crosses_over_where_it_should() -> None:
    # n e = sqrt(n d/2) at n = d / (2 e^2) = 2.
    shift = context_shift(torch.arange(5), 4e-4, 1e-2)
    assert shift.tolist() == pytest.approx([0, 1e-2, 2e-2, math.sqrt(6e-4), math.sqrt(8e-4)])


@few
@given(
    st.integers(1, 30),
    st.lists(tvs, min_size=5, max_size=5),
    st.integers(0, 5),
    tvs,
)
def test_monotone_in_each_argument(
    horizon: int, arguments: list[float], which: int, more: float
) -> None:
    def compute(horizon: int, kl: float, tv: float, ks: float, ts: float, mean: float) -> Tensor:
        mean_tv = torch.full((horizon,), mean, dtype=torch.float64)
        bounds = error_bounds(
            horizon, kl, tv, ks, ts, mean_tv, rejection_rate=mean, accepted_error=kl
        )
        return torch.stack([getattr(bounds, field.name) for field in fields(bounds)])

    before = compute(horizon, *arguments)
    raised = list(arguments)
    if which == 5:
        horizon += 3
    else:
        raised[which] = min(1.0, raised[which] + more)
    assert (compute(horizon, *raised) >= before * (1 - 1e-12)).all()


@few
@given(horizons, kls, tvs, kls, tvs, st.floats(-5.0, 5.0), st.floats(0.1, 10.0))
def test_bounds_scale_with_the_width_of_the_rewards(
    horizon: int, kl: float, tv: float, kl_seq: float, tv_seq: float, low: float, width: float
) -> None:
    free = {"rejection_rate": 0.25, "accepted_error": 0.0}
    unit = error_bounds(horizon, kl, tv, kl_seq, tv_seq, **free)
    wide = error_bounds(horizon, kl, tv, kl_seq, tv_seq, reward_range=(low, low + width), **free)
    for field in fields(ErrorBounds):
        expected = getattr(unit, field.name).item() * width
        assert getattr(wide, field.name).item() == pytest.approx(expected, rel=1e-9)


def test_proposition_3_10_a_small_average_says_nothing() -> None:
    # One context of KL 1, reached with probability p: kl_seq = p -> 0 while kl_max stays 1.
    behavior, policy = pair_with_token_kl_one()
    for p in (1e-1, 1e-3, 1e-6):
        pair = Pair.rare_context(p, behavior, policy)
        assert pair.kl_max == pytest.approx(1.0)
        assert pair.kl_seq == pytest.approx(p)
        b = values(error_bounds(pair.horizon, pair.kl_max, None, pair.kl_seq, None))
        for name in ("coupling", "pinsker_marginal_kl", "pinsker_marginal_tv"):
            assert b[name] >= 4 * math.sqrt(0.5) * 0.7, name  # as bad as for p = 1
        assert b["mixed_kl"] == pytest.approx(4 * 2 * math.sqrt(0.5) * math.sqrt(p / 2))


# --- Exact policy pairs: does it bound?


@dataclass(frozen=True, eq=False)
class Pair:
    """Two policies over all sequences of a fixed length, and one reward each, in full."""

    vocab: int
    horizon: int
    behavior: dict[tuple[int, ...], Tensor]  # context -> [V] probabilities
    policy: dict[tuple[int, ...], Tensor]
    rewards: Tensor  # [V ** T]

    @classmethod
    def random(cls, seed: int, vocab: int, horizon: int, distance: float) -> "Pair":
        generator = torch.Generator().manual_seed(seed)

        def normal(size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        behavior, policy = {}, {}
        for n in range(horizon):
            for context in itertools.product(range(vocab), repeat=n):
                logits = normal(vocab)
                # Uneven distances, so that the adaptive bounds and masks have something to see.
                step = distance * normal(1).abs() * normal(vocab)
                behavior[context] = logits.softmax(0)
                policy[context] = (logits + step).softmax(0)
        rewards = torch.rand(vocab**horizon, generator=generator, dtype=torch.float64).round()
        return cls(vocab, horizon, behavior, policy, rewards)

    @classmethod
    def rare_context(cls, p: float, behavior: Tensor, policy: Tensor) -> "Pair":
        first = torch.tensor([1 - p, p], dtype=torch.float64)
        same = torch.tensor([0.5, 0.5], dtype=torch.float64)
        mu = {(): first, (0,): same, (1,): behavior}
        return cls(2, 2, mu, {(): first, (0,): same, (1,): policy}, torch.ones(4))

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.vocab), repeat=self.horizon))

    def log_probs(self, which: dict[tuple[int, ...], Tensor]) -> Tensor:
        """Of each token of each sequence: [V ** T, T]."""
        return torch.stack(
            [
                torch.stack([which[y[:t]][y[t]].log() for t in range(self.horizon)])
                for y in self.sequences
            ]
        )

    def per_context(self, kind: str) -> dict[tuple[int, ...], float]:
        def one(mu: Tensor, pi: Tensor) -> float:
            if kind == "kl":
                return (mu * (mu / pi).log()).sum().item()
            return 0.5 * (mu - pi).abs().sum().item()

        return {c: one(self.behavior[c], self.policy[c]) for c in self.behavior}

    @property
    def kl_max(self) -> float:
        return max(self.per_context("kl").values())

    @property
    def tv_max(self) -> float:
        return max(self.per_context("tv").values())

    def position_means(self, kind: str) -> Tensor:
        """Mean divergence at each position over the behaviour's contexts: [T]."""
        means = torch.zeros(self.horizon, dtype=torch.float64)
        for context, value in self.per_context(kind).items():
            reach = math.prod(
                self.behavior[context[:t]][context[t]].item() for t in range(len(context))
            )
            means[len(context)] += reach * value
        return means

    @property
    def kl_seq(self) -> float:
        return self.position_means("kl").sum().item()

    @property
    def tv_seq(self) -> float:
        mu, pi = self.mass()
        return 0.5 * (mu - pi).abs().sum().item()

    def mass(self) -> tuple[Tensor, Tensor]:
        return (
            self.log_probs(self.behavior).sum(-1).exp(),
            self.log_probs(self.policy).sum(-1).exp(),
        )

    @property
    def ratios(self) -> Tensor:
        return (self.log_probs(self.policy) - self.log_probs(self.behavior)).exp()

    @property
    def gain(self) -> float:
        mu, pi = self.mass()
        return ((pi - mu) * self.rewards).sum().item()

    def surrogate(self, accept: Tensor | None = None) -> float:
        mu, _ = self.mass()
        chosen = torch.ones_like(mu) if accept is None else accept.double()
        return (chosen * mu * self.rewards * (self.ratios - 1).sum(-1)).sum().item()

    def bounds(self, **free: object) -> ErrorBounds:
        return error_bounds(
            self.horizon,
            self.kl_max,
            self.tv_max,
            self.kl_seq,
            self.tv_seq,
            self.position_means("tv"),
            **free,
        )


def pair_with_token_kl_one() -> tuple[Tensor, Tensor]:
    """mu = (1/2, 1/2) and the pi with KL(mu || pi) = 1: pi (1 - pi) = exp(-2) / 4."""
    pi = 0.5 - 0.5 * math.sqrt(1 - math.exp(-2))
    return (
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        torch.tensor([pi, 1 - pi], dtype=torch.float64),
    )


PAIRS = [
    Pair.random(seed, vocab, horizon, distance)
    for seed in range(6)
    for vocab, horizon in ((2, 4), (3, 3))
    for distance in (0.02, 0.3, 1.5)
]


def test_every_bound_holds_on_exactly_enumerated_policies() -> None:
    tightest = 0.0
    for pair in PAIRS:
        error = abs(pair.gain - pair.surrogate())
        for name, bound in values(pair.bounds()).items():
            assert error <= bound, (name, error, bound)
        tightest = max(tightest, error / pair.bounds().unified.item())
    assert tightest > 0.01  # or the test would see nothing


def test_ln_trm_weights_bound_the_error() -> None:
    # Appendix F.2: |Error| <= 2 E[W].
    for pair in PAIRS:
        after = torch.arange(pair.horizon).flip(0)
        weights = context_shift(after, pair.kl_max, pair.tv_max)
        mu, _ = pair.mass()
        mean_w = (mu * ((pair.ratios - 1).abs() * weights).sum(-1)).sum().item()
        assert abs(pair.gain - pair.surrogate()) <= 2 * mean_w


def test_precondition_free_guarantee_holds_with_any_mask() -> None:
    seen_rates = []
    for pair in PAIRS:
        mu, _ = pair.mass()
        spread = pair.ratios.log().abs().sum(-1)
        for tau in spread.quantile(torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)).tolist():
            accept = spread <= tau
            rate = mu[~accept].sum().item()
            seen_rates.append(rate)
            ratios = pair.ratios
            true_error = (mu * pair.rewards * (ratios.prod(-1) - 1 - (ratios - 1).sum(-1)))[accept]
            accepted = accepted_error_bound(tau, rejection_rate=rate).item()
            assert abs(true_error.sum().item()) <= accepted + 1e-15
            bounds = pair.bounds(rejection_rate=rate, accepted_error=accepted)
            surrogate = pair.surrogate(accept)
            two_sided = bounds.precondition_free.item()
            one_sided = bounds.precondition_free_improvement.item()
            assert abs(pair.gain - surrogate) <= two_sided + 1e-15
            assert pair.gain >= surrogate - one_sided - 1e-15
            assert one_sided <= two_sided
    assert min(seen_rates) < 1e-12 and max(seen_rates) > 0.3


def test_precondition_free_by_hand() -> None:
    free = {"rejection_rate": 0.03, "accepted_error": 0.5}
    bounds = error_bounds(10, 0.1, 0.1, 0.1, 0.2, **free)
    assert bounds.precondition_free.item() == pytest.approx(0.5 + 0.03 + 0.2)
    assert bounds.precondition_free_improvement.item() == pytest.approx(0.5 + 0.03)
    wide = error_bounds(10, 0.1, 0.1, 0.1, 0.2, reward_range=(-1.0, 1.0), **free)
    assert wide.precondition_free.item() == pytest.approx(0.5 + 2 * (0.03 + 0.2))
    none = error_bounds(10, 0.1, 0.1, 0.1, 0.2)
    assert none.precondition_free is None and none.precondition_free_improvement is None
    # It never enters the minimum: it bounds another error.
    assert bounds.unified.item() == none.unified.item()


def test_accepted_error_bound_by_hand() -> None:
    assert accepted_error_bound(1.0).item() == pytest.approx(math.e - 2)
    half = accepted_error_bound(1.0, rejection_rate=0.5, reward_range=(0.0, 4.0))
    assert half.item() == pytest.approx(2 * (math.e - 2))
    assert accepted_error_bound(0.0).item() == 0.0
    assert accepted_error_bound(1e-3).item() == pytest.approx(5e-7, rel=1e-3)
    assert accepted_error_bound(math.inf).item() == math.inf
    assert accepted_error_bound(math.inf, rejection_rate=1.0).item() == 0.0


# --- Arguments


def test_tensors_broadcast_and_match_numbers() -> None:
    kl = torch.tensor([[1e-4], [1e-2]], requires_grad=True)
    tv = torch.tensor([1e-3, 5e-3, 0.5])
    mean_tv = torch.full((2, 1, 50), 1e-3)
    bounds = error_bounds(
        50, kl, tv, 0.01, None, mean_tv, rejection_rate=0.1, accepted_error=torch.ones(3)
    )
    for field in fields(ErrorBounds):
        tensor = getattr(bounds, field.name)
        assert tensor.shape == (2, 3) and tensor.dtype == torch.float64
        assert not tensor.requires_grad
    one = error_bounds(50, kl[1].item(), tv[2].item(), 0.01, None, mean_tv[0, 0])
    for name, value in values(one).items():
        assert getattr(bounds, name)[1, 2].item() == pytest.approx(value, rel=1e-12)


def test_extremes() -> None:
    assert set(values(error_bounds(0, 1.0, 1.0, 1.0, 1.0)).values()) == {0.0}
    single = values(error_bounds(1, math.inf, 1.0, math.inf, 1.0))
    mixed = {name: single.pop(name) for name in ("mixed_kl", "mixed_tv")}
    assert set(single.values()) == {0.0} and set(mixed.values()) == {4.0}
    worst = values(error_bounds(5, math.inf, None, math.inf, None))
    assert worst["pinsker_marginal_kl"] == worst["coupling"] == 16.0 and worst["unified"] == 16.0
    assert set(values(error_bounds(9, 0.0, 0.0, 0.0, 0.0)).values()) == {0.0}
    # A mean that contradicts the maximum is believed.
    high = error_bounds(4, 1e-4, 1e-3, 0.1, 0.1, torch.full((4,), 0.5))
    assert high.adaptive > high.coupling


GOOD = {"horizon": 4, "kl_max": 0.1, "tv_max": 0.1, "kl_seq": 0.1, "tv_seq": 0.1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"horizon": -1}, "horizon must be an integer >= 0, got -1"),
        ({"horizon": 4.0}, "horizon must be an integer >= 0, got 4.0"),
        ({"kl_max": math.nan}, "kl_max must be at least 0, got nan"),
        ({"kl_seq": -1e-9}, "kl_seq must be at least 0"),
        ({"tv_max": math.inf}, "tv_max must be finite and at least 0, got inf"),
        ({"tv_seq": torch.tensor([0.1, math.nan])}, "tv_seq must be finite and at least 0"),
        ({"mean_tv": torch.zeros(3)}, r"mean_tv must be \[..., horizon\] with horizon 4, got"),
        ({"mean_tv": torch.tensor(0.1)}, r"mean_tv must be \[..., horizon\]"),
        ({"mean_tv": torch.full((4,), math.nan)}, "mean_tv must be finite"),
        ({"reward_range": (1.0, 1.0)}, "reward_range must be .* lowest < highest"),
        ({"reward_range": (0.0, math.inf)}, "reward_range must be"),
        ({"rejection_rate": 0.1}, "go together, got only rejection_rate"),
        ({"accepted_error": 0.1}, "go together, got only accepted_error"),
        (
            {"rejection_rate": 1.5, "accepted_error": 0.1},
            "rejection_rate must be between 0 and 1, got 1.5",
        ),
        (
            {"kl_max": torch.zeros(2), "tv_max": torch.zeros(3)},
            r"shapes must broadcast, got \(2,\), \(3,\)",
        ),
    ],
)
def test_errors_say_what_arrived(change: dict[str, object], message: str) -> None:
    error_bounds(**GOOD)
    with pytest.raises(ValueError, match=message):
        error_bounds(**{**GOOD, **change})


def test_results_are_frozen() -> None:
    bounds = error_bounds(**GOOD)
    with pytest.raises(AttributeError):
        bounds.unified = torch.zeros(())
    assert replace(bounds, unified=torch.zeros(())).unified.item() == 0.0
