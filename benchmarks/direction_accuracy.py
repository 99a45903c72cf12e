# SPDX-License-Identifier: Apache-2.0
"""How often does each direction have the wrong sign, and how often is the sign proven?

    python benchmarks/direction_accuracy.py [--json PATH] [--dtype float32|float64] [--seed N]

Synthetic pairs of policies, the directions computed as a trainer would (mu computed and stored and
pi's statistics computed in --dtype), against two truths in float64: (a) the derivative of the top-K
KL that gates, (b) the derivative of the full-vocabulary KL. A token counts as wrong if the signs
differ. The last columns repeat (b) on the tokens with D > 0.15 only, where a mask acts on the sign.
A proven sign that is wrong would be a bug; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdm import (
    BehaviorSupport,
    certified_kl_direction,
    kl_direction,
    kl_direction_full,
    policy_statistics,
    ratio_direction,
    topk_kl,
)

DIRECTIONS = ("ratio", "aggregated", "uniform", "exact", "certified")
THRESHOLD = 0.15
CHUNK_ELEMENTS = 4_000_000


@dataclass(frozen=True)
class Regime:
    """Behavior logits of a spread drawn log-uniformly from ``scale``; see ``draw`` for the rest."""

    name: str
    tokens: int
    vocab: int
    k: int
    scale: tuple[float, float]
    distance: tuple[float, float] = (0.1, 1.5)
    heavy_tail: bool = False
    sampled: str = "behavior"  # or "outside": any token that is not among the top K


REGIMES = (
    Regime("flat to peaked, V=300", 20_000, 300, 20, (0.3, 6.0)),
    Regime("  K=5", 20_000, 300, 5, (0.3, 6.0)),
    Regime("  K=64", 20_000, 300, 64, (0.3, 6.0)),
    Regime("  sampled outside top K", 20_000, 300, 20, (0.3, 6.0), sampled="outside"),
    Regime("low entropy, V=32768", 800, 32_768, 20, (9.0, 20.0)),
    Regime("medium entropy", 800, 32_768, 20, (4.0, 9.0)),
    Regime("high entropy", 800, 32_768, 20, (0.3, 4.0)),
    Regime("heavy tail (Zipf)", 800, 32_768, 20, (0.7, 2.0), heavy_tail=True),
    Regime("  small drift", 800, 32_768, 20, (0.7, 2.0), (0.01, 0.1), heavy_tail=True),
)
ENTROPY_BINS = ((0.0, 0.5), (0.5, 2.0), (2.0, 4.0), (4.0, 99.0))


@dataclass(frozen=True, eq=False)
class Outcome:
    """Per token [T]: whose sign is wrong, by direction, and what the token is like."""

    wrong_topk: dict[str, Tensor]
    wrong_full: dict[str, Tensor]
    certified: Tensor
    outside: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Row:
    """One line of the table; shares of tokens."""

    name: str
    tokens: int
    outside_tokens: int
    mean_entropy_nats: float
    certified: float
    certified_outside: float
    certified_but_wrong: int
    wrong_topk: dict[str, float]
    wrong_full: dict[str, float]
    wrong_full_outside: dict[str, float]


def draw(regime: Regime, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of both policies [T, V] in float32 precision, and the sampled tokens [T]."""

    def log_uniform(low: float, high: float) -> Tensor:
        uniform = torch.rand(tokens, 1, generator=generator, dtype=torch.float64)
        return low * (high / low) ** uniform

    def normal() -> Tensor:
        return torch.randn(tokens, regime.vocab, generator=generator)

    scale = log_uniform(*regime.scale)
    if regime.heavy_tail:
        ranks = torch.arange(1, regime.vocab + 1, dtype=torch.float64)
        behavior = -scale * ranks.log() + 0.5 * normal()
    else:
        behavior = scale * normal()
    policy = behavior + log_uniform(*regime.distance) * normal()
    behavior, policy = behavior.float(), policy.float()
    weights = torch.softmax(behavior, dim=-1)
    if regime.sampled == "outside":
        weights = torch.ones_like(weights).scatter(-1, behavior.topk(regime.k).indices, 0.0)
    return behavior, policy, torch.multinomial(weights, 1, generator=generator).squeeze(-1)


def judge(regime: Regime, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Outcome:
    """Compare every direction in ``dtype`` with both derivatives in float64."""
    behavior, policy, sampled = draw(regime, tokens, generator)

    def report(precision: torch.dtype) -> tuple[Tensor, BehaviorSupport]:
        log_mu = torch.log_softmax(behavior.to(precision), dim=-1)
        values, ids = log_mu.topk(regime.k, dim=-1)
        own = log_mu.gather(-1, sampled[:, None]).squeeze(-1)
        return log_mu, BehaviorSupport.from_topk(ids, values, sampled, own)

    log_mu, true_support = report(torch.float64)
    true_stats = policy_statistics(policy.double(), true_support)
    log_pi = torch.log_softmax(policy.double(), dim=-1)
    topk_truth = kl_direction(true_support, true_stats, tail="exact")
    full_truth = kl_direction_full(log_mu, log_pi, sampled)

    _, support = report(dtype)
    stats = policy_statistics(policy.to(dtype), support)
    certified = certified_kl_direction(support, stats)
    found = {
        "ratio": ratio_direction(support.sampled_log_probs, stats.log_prob),
        "aggregated": kl_direction(support, stats, tail="aggregated"),
        "uniform": kl_direction(support, stats, tail="uniform"),
        "exact": kl_direction(support, stats, tail="exact"),
        "certified": certified.direction,
    }
    signs = {name: direction.sign().double() for name, direction in found.items()}
    return Outcome(
        wrong_topk={name: sign != topk_truth.sign() for name, sign in signs.items()},
        wrong_full={name: sign != full_truth.sign() for name, sign in signs.items()},
        certified=certified.certified,
        outside=topk_kl(support, stats) > THRESHOLD,
        entropy=stats.entropy,
    )


def collect(regime: Regime, generator: torch.Generator, dtype: torch.dtype) -> Outcome:
    """All tokens of a regime, in pieces that fit."""
    size = max(1, CHUNK_ELEMENTS // regime.vocab)
    pieces = [
        judge(regime, min(size, regime.tokens - start), generator, dtype)
        for start in range(0, regime.tokens, size)
    ]

    def joined(pick: Callable[[Outcome], Tensor]) -> Tensor:
        return torch.cat([pick(piece) for piece in pieces])

    def by_name(pick: Callable[[Outcome], dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([pick(p)[name] for p in pieces]) for name in DIRECTIONS}

    return Outcome(
        wrong_topk=by_name(lambda piece: piece.wrong_topk),
        wrong_full=by_name(lambda piece: piece.wrong_full),
        certified=joined(lambda piece: piece.certified),
        outside=joined(lambda piece: piece.outside),
        entropy=joined(lambda piece: piece.entropy),
    )


def summarize(name: str, outcome: Outcome, chosen: Tensor) -> Row:
    """Shares over the chosen tokens [T] bool; NaN where none was chosen."""

    def share(of: Tensor, among: Tensor) -> float:
        return of[among].double().mean().item()

    outside = chosen & outcome.outside
    return Row(
        name=name,
        tokens=int(chosen.sum()),
        outside_tokens=int(outside.sum()),
        mean_entropy_nats=outcome.entropy[chosen].double().mean().item(),
        certified=share(outcome.certified, chosen),
        certified_outside=share(outcome.certified, outside),
        certified_but_wrong=int(
            (chosen & outcome.certified & outcome.wrong_full["certified"]).sum()
        ),
        wrong_topk={n: share(wrong, chosen) for n, wrong in outcome.wrong_topk.items()},
        wrong_full={n: share(wrong, chosen) for n, wrong in outcome.wrong_full.items()},
        wrong_full_outside={n: share(wrong, outside) for n, wrong in outcome.wrong_full.items()},
    )


def table(rows: list[Row]) -> str:
    """Text of all rows, in percent."""
    short = {"aggregated": "aggr", "uniform": "unif", "certified": "cert"}
    names = [short.get(name, name) for name in DIRECTIONS]
    head = f"{'':28}{'tokens':>7}{'H':>6}{'proven':>8} |" + 2 * (
        "".join(f"{name:>7}" for name in names) + " |"
    )
    head += f"{'tokens':>7}{'proven':>8}" + "".join(f"{name:>7}" for name in names)
    group = f"{'':49} | {'(a) wrong for top-K KL, %':34} | {'(b) wrong for full KL, %':34} | "
    lines = [group + "(b) where D > 0.15, %", head, "-" * len(head)]
    for row in rows:

        def percent(shares: dict[str, float]) -> str:
            return "".join(f"{100 * shares[name]:7.2f}" for name in DIRECTIONS)

        lines.append(
            f"{row.name:28}{row.tokens:7}{row.mean_entropy_nats:6.2f}{100 * row.certified:8.1f} |"
            f"{percent(row.wrong_topk)} |{percent(row.wrong_full)} |"
            f"{row.outside_tokens:7}{100 * row.certified_outside:8.1f}"
            f"{percent(row.wrong_full_outside)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write what made it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows, settings and versions here")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    start = time.perf_counter()
    generator = torch.Generator().manual_seed(arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    rows, wide = [], []
    for regime in REGIMES:
        outcome = collect(regime, generator, dtype)
        everything = torch.ones_like(outcome.certified)
        rows.append(summarize(regime.name, outcome, everything))
        if regime.vocab > 300 and regime.name != "  small drift":
            wide.append(outcome)
    for low, high in ENTROPY_BINS:
        parts = [summarize("", o, (o.entropy >= low) & (o.entropy < high)) for o in wide]
        rows.append(_pooled(f"V=32768, H {low:g} to {high:g} nats", parts))
    seconds = time.perf_counter() - start

    print(table(rows))
    mistakes = sum(row.certified_but_wrong for row in rows[: len(REGIMES)])
    print(
        f"{arguments.dtype}, seed {arguments.seed}, {seconds:.0f} s; proven but wrong: {mistakes}"
    )
    if arguments.json:
        result = {
            "benchmark": "direction_accuracy",
            "device": "cpu",
            "machine": {"architecture": platform.machine(), "threads": torch.get_num_threads()},
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "settings": {
                "dtype": arguments.dtype,
                "seed": arguments.seed,
                "threshold": THRESHOLD,
                "regimes": [asdict(regime) for regime in REGIMES],
            },
            "seconds": round(seconds, 1),
            "rows": [_without_nan(asdict(row)) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if mistakes:
        sys.exit(1)


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a share of no tokens is null."""
    return {
        name: _without_nan(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and math.isnan(value)
        else value
        for name, value in values.items()
    }


def _pooled(name: str, parts: list[Row]) -> Row:
    """Rows of disjoint sets of tokens as one row."""

    def mean(values: list[float], counts: list[int]) -> float:
        total = sum(counts)
        pairs = zip(values, counts, strict=True)
        return sum(v * n for v, n in pairs if n) / total if total else float("nan")

    tokens, outside = [row.tokens for row in parts], [row.outside_tokens for row in parts]
    return Row(
        name=name,
        tokens=sum(tokens),
        outside_tokens=sum(outside),
        mean_entropy_nats=mean([row.mean_entropy_nats for row in parts], tokens),
        certified=mean([row.certified for row in parts], tokens),
        certified_outside=mean([row.certified_outside for row in parts], outside),
        certified_but_wrong=sum(row.certified_but_wrong for row in parts),
        wrong_topk={n: mean([r.wrong_topk[n] for r in parts], tokens) for n in DIRECTIONS},
        wrong_full={n: mean([r.wrong_full[n] for r in parts], tokens) for n in DIRECTIONS},
        wrong_full_outside={
            n: mean([r.wrong_full_outside[n] for r in parts], outside) for n in DIRECTIONS
        },
    )


if __name__ == "__main__":
    main()
