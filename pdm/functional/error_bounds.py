# SPDX-License-Identifier: Apache-2.0
"""How far the surrogate can be from the true change of the objective, over a whole sequence.

    Error = J(policy) - J(behavior) - L'(policy),   L' = E_behavior[R sum_t (rho_t - 1)]

If |Error| <= B and L' > B, the update improves the objective. Every bound below multiplies a bound
on the advantage at a token with a bound on how far the contexts have drifted, and sums over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Scalar = float | Tensor
"""A number, or a tensor of numbers that broadcasts against the other arguments."""


@dataclass(frozen=True, eq=False)
class ErrorBounds:
    """Upper bounds on |Error|, in units of reward; float64 tensors of one shape, [...].

    With d = kl_max, e = tv_max, n = t - 1 tokens before and T - t tokens after token t. All certify
    the same thing, |Error| <= bound for a policy pair whose *true* divergences do not exceed the
    arguments, at every context that the behaviour can reach, sampled or not:

    - ``classical``: 2 T (T - 1) e^2, without any cap
    - ``coupling``: 4 min(1, e) sum_t min(1, n e)
    - ``pinsker_marginal_kl``: 4 min(1, sqrt(d/2)) sum_t min(1, sqrt(n d/2))
    - ``pinsker_marginal_tv``: 4 min(1, e) sum_t min(1, sqrt(n d/2))
    - ``mixed_kl``: 4 T min(1, sqrt(d/2)) min(1, sqrt(kl_seq/2))
    - ``mixed_tv``: 4 T min(1, e) min(1, tv_seq)
    - ``adaptive_kl``: 4 sum_t mean_tv_t min(1, sqrt((T - t) d/2))
    - ``adaptive_tv``: 4 sum_t mean_tv_t min(1, (T - t) e)
    - ``adaptive``: 4 sum_t mean_tv_t min(1, (T - t) e, sqrt((T - t) d/2))
    - ``unified``: the smallest of them all

    The last two do not need divergences that are small at every context, and are None unless
    ``rejection_rate`` was given. They bound another error, against the surrogate of the *accepted*
    sequences L'_masked = E_behavior[accept (R - lowest reward) sum_t (rho_t - 1)]:

    - ``precondition_free``: accepted_error + width (r + tv_seq), for
      |J(policy) - J(behavior) - L'_masked| (section 4.5)
    - ``precondition_free_improvement``: accepted_error + width min(r, tv_seq), for one side,
      J(policy) - J(behavior) >= L'_masked - bound. Sharper, and with tv_seq = 1 (unknown) it
      rests on the observed rejection rate alone. Ours: rewards above the lowest are not
      negative, so rejected sequences lose at most their probability under the behaviour.
    """

    classical: Tensor
    coupling: Tensor
    pinsker_marginal_kl: Tensor
    pinsker_marginal_tv: Tensor
    mixed_kl: Tensor
    mixed_tv: Tensor
    adaptive_kl: Tensor
    adaptive_tv: Tensor
    adaptive: Tensor
    unified: Tensor
    precondition_free: Tensor | None = None
    precondition_free_improvement: Tensor | None = None


def error_bounds(
    horizon: int,
    kl_max: Scalar,
    tv_max: Scalar | None,
    kl_seq: Scalar,
    tv_seq: Scalar | None,
    mean_tv: Tensor | None = None,
    *,
    reward_range: tuple[float, float] = (0.0, 1.0),
    rejection_rate: Scalar | None = None,
    accepted_error: Scalar | None = None,
) -> ErrorBounds:
    """Bound the error of the surrogate objective from divergences of policy and behaviour.

    The formulas stand at the fields of ``ErrorBounds``; every one is multiplied by the width of
    ``reward_range``. What is certified, and what is not:

    - The arguments must bound the true, full-vocabulary divergences. A top-K or binary KL (or TV)
      is a lower bound of the true one: put in here it gives an indicator, and certifies nothing
      by itself.
    - ``kl_max`` and ``tv_max`` are maxima over *all* reachable contexts. The maximum over a
      sample, accepted or not, is a lower bound of it too. Masking tokens does not lower it.
    - ``kl_seq`` and ``tv_seq`` alone certify nothing: kl_seq may be as small as one likes while
      kl_max stays at 1 (Proposition 3.10).

    Shapes: ``horizon`` T, the largest response length (a finished sequence counts on with
    divergence 0); ``kl_max`` max KL(behavior || policy) of a token and ``kl_seq`` that of a whole
    sequence, both in nats, ``tv_max`` and ``tv_seq`` the same in total variation, as numbers or
    tensors that broadcast to [...]; ``mean_tv`` [..., T], the mean TV at each position over the
    behaviour's contexts; ``rejection_rate`` r and ``accepted_error`` [...], given together: the
    probability under the behaviour of being rejected, and a bound, in units of reward, on the error
    over the accepted sequences (``accepted_error_bound``, or ``unified`` where its conditions
    hold). ``reward_range``: lowest and highest reward. Returns float64 tensors [...].

    Gradient: none.

    Edge cases: ``tv_max`` or ``tv_seq`` None takes Pinsker's min(1, sqrt(KL/2)). ``mean_tv`` None
    takes the worst case min(1, tv_max, sqrt(kl_max/2)) at every position, so that the adaptive
    bounds then are the best of the others; a given ``mean_tv`` is believed, also where it is above
    that (an estimate may be), and then they may exceed the others. KL may be +inf. TV is capped at
    1 everywhere but in ``classical``. T = 0 gives 0. A NaN, a negative number, an infinite TV, a
    rate above 1, a range without width, one of ``rejection_rate`` and ``accepted_error`` without
    the other, and shapes that do not fit raise ``ValueError``; the check waits for the device.

    Source: trust region masking, sections 3.1-3.4 (Theorems 3.3-3.8, Eq. 21), Table 1, section 4.5.
    """
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 0:
        raise ValueError(f"error_bounds: horizon must be an integer >= 0, got {horizon!r}")
    width = _width("error_bounds", reward_range)
    arguments = (kl_max, tv_max, kl_seq, tv_seq, mean_tv, rejection_rate, accepted_error)
    device = next((x.device for x in arguments if isinstance(x, Tensor)), torch.device("cpu"))

    def number(name: str, value: Scalar, highest: float = math.inf) -> Tensor:
        return _checked("error_bounds", name, value, device, highest)

    kl = number("kl_max", kl_max)
    kl_whole = number("kl_seq", kl_seq)
    tv = _pinsker(kl) if tv_max is None else number("tv_max", tv_max, _LARGEST)
    tv_whole = _pinsker(kl_whole) if tv_seq is None else number("tv_seq", tv_seq, _LARGEST)
    kl, tv, kl_whole, tv_whole = _broadcast(kl, tv, kl_whole, tv_whole)

    advantage_kl, advantage_tv = _pinsker(kl), tv.clamp_max(1.0)
    before = torch.arange(horizon, dtype=torch.float64, device=device)
    by_pinsker = context_shift(before, kl[..., None], None)
    by_coupling = context_shift(before, None, tv[..., None])
    if mean_tv is None:
        mean = torch.minimum(advantage_kl, advantage_tv)[..., None]
    else:
        mean = number("mean_tv", mean_tv, _LARGEST).clamp_max(1.0)
        if mean.dim() == 0 or mean.shape[-1] != horizon:
            raise ValueError(
                f"error_bounds: mean_tv must be [..., horizon] with horizon {horizon}, got shape "
                f"{tuple(mean.shape)}"
            )
    # What lies before token t in one direction lies after token T + 1 - t in the other.
    after_pinsker, after_coupling = by_pinsker.flip(-1), by_coupling.flip(-1)

    scale = 4.0 * width
    bounds = {
        "classical": 2.0 * width * horizon * (horizon - 1) * tv.square(),
        "coupling": scale * advantage_tv * by_coupling.sum(dim=-1),
        "pinsker_marginal_kl": scale * advantage_kl * by_pinsker.sum(dim=-1),
        "pinsker_marginal_tv": scale * advantage_tv * by_pinsker.sum(dim=-1),
        "mixed_kl": scale * horizon * advantage_kl * _pinsker(kl_whole),
        "mixed_tv": scale * horizon * advantage_tv * tv_whole.clamp_max(1.0),
        "adaptive_kl": scale * (mean * after_pinsker).sum(dim=-1),
        "adaptive_tv": scale * (mean * after_coupling).sum(dim=-1),
        "adaptive": scale * (mean * torch.minimum(after_pinsker, after_coupling)).sum(dim=-1),
    }
    free = _precondition_free(rejection_rate, accepted_error, tv_whole, width, device)
    tensors = _broadcast(*bounds.values(), *free)
    named = dict(zip(bounds, tensors, strict=False))
    return ErrorBounds(
        **named,
        unified=torch.stack(list(named.values())).amin(dim=0),
        precondition_free=tensors[-2] if free else None,
        precondition_free_improvement=tensors[-1] if free else None,
    )


def accepted_error_bound(
    log_ratio_sum: Scalar,
    *,
    rejection_rate: Scalar = 0.0,
    reward_range: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Bound the error over the accepted sequences from a criterion on their sampled ratios.

    B_A = width (1 - r) (exp(tau) - 1 - tau), for an ``accepted_error`` of ``error_bounds``.

    Certified if every sequence that *could* be accepted has sum_t |log rho_t| <= tau, as it does
    when the acceptance criterion says so; k2 max-filtering at threshold x gives
    tau = T sqrt(2 x). No precondition on unseen contexts, at a price exponential in tau.

    Why: prod_t (1 + x_t) - 1 - sum_t x_t with x_t = rho_t - 1 is a sum of products of two or more
    x_t, so its size is largest when all have the sign of |x_t| <= exp(|log rho_t|) - 1; then the
    product is at most exp(tau) and the sum at least tau.

    Shapes: tau >= 0 and r in [0, 1] as numbers or tensors that broadcast to [...]; returns [...]
    float64.

    Gradient: none.

    Edge cases: tau = 0 gives 0, a large tau +inf. With r = 1 nothing is accepted and the bound is
    0. A NaN, a negative number, a rate above 1 or a range without width raises ``ValueError``.

    Source: trust region masking, section 4.5 (a pointwise sample criterion at an
    exponential-in-tau cost); the formula and its proof are ours.
    """
    width = _width("accepted_error_bound", reward_range)
    given = (log_ratio_sum, rejection_rate)
    device = next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))
    tau = _checked("accepted_error_bound", "log_ratio_sum", log_ratio_sum, device)
    rate = _checked("accepted_error_bound", "rejection_rate", rejection_rate, device, 1.0)
    tau, rate = _broadcast(tau, rate)
    growth = torch.where(tau.isinf(), torch.inf, torch.expm1(tau) - tau).clamp_min(0.0)
    return torch.where(rate < 1.0, width * (1.0 - rate) * growth, 0.0)


def context_shift(steps: Tensor, kl_max: Scalar | None, tv_max: Scalar | None) -> Tensor:
    """Bound the total variation between two policies' outcomes of ``steps`` tokens.

    min(1, n tv_max, sqrt(n kl_max / 2)) for n steps; None leaves a route out.

    Shapes: ``steps`` [...] of any dtype, the divergences numbers or tensors that broadcast against
    it; returns [...] float64.

    Gradient: none.

    Edge cases: exactly 0 at 0 steps, whatever the divergences, +inf included.

    Source: trust region masking, Lemma 3.2 (coupling and Pinsker on the marginal KL) and D.3.
    """
    steps = steps.double()
    shift = torch.ones_like(steps)
    if tv_max is not None:
        shift = torch.minimum(shift, steps * tv_max)
    if kl_max is not None:
        shift = torch.minimum(shift, (steps * kl_max / 2.0).sqrt())
    # 0 steps of an infinite KL would be NaN.
    return torch.where(steps > 0, shift, 0.0)


_LARGEST = torch.finfo(torch.float64).max


def _pinsker(kl: Tensor) -> Tensor:
    """Pinsker's bound on the total variation, min(1, sqrt(KL / 2))."""
    return (kl / 2.0).sqrt().clamp_max(1.0)


def _precondition_free(
    rejection_rate: Scalar | None,
    accepted_error: Scalar | None,
    tv_seq: Tensor,
    width: float,
    device: torch.device,
) -> list[Tensor]:
    """Both guarantees of section 4.5, or nothing."""
    if (rejection_rate is None) != (accepted_error is None):
        given = "accepted_error" if rejection_rate is None else "rejection_rate"
        raise ValueError(
            f"error_bounds: rejection_rate and accepted_error go together, got only {given}; "
            "accepted_error_bound makes one without a precondition"
        )
    if rejection_rate is None or accepted_error is None:
        return []
    rate = _checked("error_bounds", "rejection_rate", rejection_rate, device, 1.0)
    accepted = _checked("error_bounds", "accepted_error", accepted_error, device)
    rate, accepted, tv = _broadcast(rate, accepted, tv_seq.clamp_max(1.0))
    return [accepted + width * (rate + tv), accepted + width * torch.minimum(rate, tv)]


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    try:
        return tuple(torch.broadcast_tensors(*tensors))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"error_bounds: shapes must broadcast, got {shapes}") from error


def _checked(
    caller: str, name: str, value: Scalar, device: torch.device, highest: float = math.inf
) -> Tensor:
    """Turn an argument into a detached float64 tensor, and refuse what cannot be one."""
    tensor = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
    # Written so that NaN fails.
    if not bool(((tensor >= 0.0) & (tensor <= highest)).all()):
        limit = {math.inf: "at least 0", _LARGEST: "finite and at least 0"}.get(
            highest, f"between 0 and {highest:g}"
        )
        raise ValueError(f"{caller}: {name} must be {limit}, got {value!r}")
    return tensor


def _width(caller: str, reward_range: tuple[float, float]) -> float:
    low, high = reward_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"{caller}: reward_range must be (lowest, highest), finite and with lowest < highest, "
            f"got {reward_range!r}"
        )
    return float(high - low)
