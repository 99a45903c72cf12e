# SPDX-License-Identifier: Apache-2.0
"""Draw direction_disagreement.svg: where ratio and KL derivative call different steps outward.

    python docs/figures/direction_disagreement.py

Standard library only, and the same bytes on every machine. On the left all policies over three
tokens, for one behavior policy and one sampled token k; on the right the worked example of
docs/method.md followed along its gradient step. Equal scales on the left make the derivative's zero
set a true circle, as the method notes derive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

MU = (0.2, 0.75, 0.05)  # token k, then a and b
PI = (0.25, 0.25, 0.5)
THRESHOLD = 0.15
STEP = 0.4  # largest logit step shown, either way

WIDTH, HEIGHT = 880, 470
CORNERS = ((230.0, 62.0), (30.0, 408.4), (430.0, 408.4))  # all mass on k, on a, on b
INK, MUTED, PAPER = "#1f2328", "#59636e", "#ffffff"
AGREE_OUT, AGREE_IN = "#cfdcec", "#eef1f4"
RATIO_ONLY, KL_ONLY = "#f6b26b", "#b9a0e0"
RATIO_LINE, KL_LINE, MU_COLOR = "#b45309", "#1d4ed8", "#1a7f37"

Point = tuple[float, float]
Policy = tuple[float, ...]


def kl(pi: Policy) -> float:
    return sum(m * math.log(m / p) for m, p in zip(MU, pi, strict=True))


def stepped(eta: float) -> Policy:
    """PI after the logit step eta (1[i = k] - pi_i)."""
    weights = [p * math.exp(eta * ((i == 0) - p)) for i, p in enumerate(PI)]
    return tuple(weight / sum(weights) for weight in weights)


def derivative(pi: Policy) -> float:
    """Eq. 7."""
    return pi[0] - MU[0] + sum(p * (m - p) for m, p in zip(MU, pi, strict=True))


def place(pi: Policy) -> Point:
    x = sum(p * corner[0] for p, corner in zip(pi, CORNERS, strict=True))
    y = sum(p * corner[1] for p, corner in zip(pi, CORNERS, strict=True))
    return x, y


def contour() -> list[Point]:
    """Where KL(mu || pi) = THRESHOLD, found by bisection on rays from mu."""
    points = []
    for degree in range(0, 360, 3):
        angle = math.radians(degree)
        # Two directions that keep the sum at 1, orthogonal and of equal length.
        along = (math.cos(angle) * math.sqrt(2 / 3), 0.0, 0.0)
        side = math.sin(angle) / math.sqrt(2)
        ray = (along[0], -along[0] / 2 - side, -along[0] / 2 + side)
        low = 0.0
        high = min(-m / r for m, r in zip(MU, ray, strict=True) if r < 0) * (1 - 1e-9)
        for _ in range(60):
            middle = (low + high) / 2
            inside = kl(tuple(m + middle * r for m, r in zip(MU, ray, strict=True))) < THRESHOLD
            low, high = (middle, high) if inside else (low, middle)
        points.append(place(tuple(m + low * r for m, r in zip(MU, ray, strict=True))))
    return points


def edge_crossing() -> Point:
    """Where the derivative is 0 on the edge between k and b."""
    low, high = MU[0], 1.0 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        outward = derivative((middle, 0.0, 1 - middle)) > 0
        low, high = (low, middle) if outward else (middle, high)
    return place((low, 0.0, 1 - low))


def path(points: list[Point], *, closed: bool = False) -> str:
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points) + (" Z" if closed else "")


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    color: str = INK,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """A line of text; _x makes x a subscript."""
    head, *rest = words.split("_")
    for piece in rest:
        head += f'<tspan dy="4" font-size="{size - 3}">{piece[0]}</tspan>'
        head += f'<tspan dy="-4">{piece[1:]}</tspan>' if len(piece) > 1 else ""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
        f'text-anchor="{anchor}"{weight}>{head}</text>'
    )


def line(start: Point, end: Point, color: str, extra: str = "") -> str:
    (x1, y1), (x2, y2) = start, end
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" {extra}/>'
    )


def dot(point: Point, color: str) -> str:
    return (
        f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="5" fill="{color}" '
        f'stroke="{PAPER}" stroke-width="1.5"/>'
    )


def simplex() -> list[str]:
    """Left: the regions, the two criteria's borders, mu, pi and the step."""
    top, mu, pi = CORNERS[0], place(MU), place(PI)
    centre = ((top[0] + mu[0]) / 2, (top[1] + mu[1]) / 2)
    radius = math.dist(top, mu) / 2
    left, right = place((MU[0], 1 - MU[0], 0.0)), place((MU[0], 0.0, 1 - MU[0]))
    disk = f'<circle cx="{centre[0]:.1f}" cy="{centre[1]:.1f}" r="{radius:.1f}"'
    zero = edge_crossing()
    triangle = path(list(CORNERS), closed=True)
    above, below = path([top, left, right], closed=True), path([left, *CORNERS[1:], right])
    step = [place(stepped(1.5 * n / 20)) for n in range(21)]
    return [
        f'<clipPath id="above"><path d="{above}"/></clipPath>',
        f'<clipPath id="below"><path d="{below} Z"/></clipPath>',
        f'<clipPath id="all"><path d="{triangle}"/></clipPath>',
        f'<path d="{above}" fill="{RATIO_ONLY}"/><path d="{below} Z" fill="{AGREE_IN}"/>',
        f'{disk} fill="{AGREE_OUT}" clip-path="url(#above)"/>',
        f'{disk} fill="{KL_ONLY}" clip-path="url(#below)"/>',
        f'<path d="{path(contour(), closed=True)}" fill="{PAPER}" fill-opacity="0.65" '
        f'stroke="{MUTED}" stroke-width="1.2" stroke-dasharray="4 3"/>',
        line(left, right, RATIO_LINE, 'stroke-width="2"'),
        f'{disk} fill="none" stroke="{KL_LINE}" stroke-width="2" clip-path="url(#all)"/>',
        f'<path d="{triangle}" fill="none" stroke="{INK}" stroke-width="1.2"/>',
        f'<path d="{path(step)}" fill="none" stroke="{INK}" stroke-width="2" '
        'marker-end="url(#arrow)"/>',
        dot(mu, MU_COLOR),
        dot(pi, INK),
        text(mu[0] - 9, mu[1] + 17, "μ", size=15, color=MU_COLOR, bold=True),
        text(pi[0] + 9, pi[1] + 14, "π", size=15, bold=True),
        text(top[0], top[1] - 10, "sampled token k", anchor="middle"),
        text(CORNERS[1][0] - 8, CORNERS[1][1] + 19, "token a"),
        text(CORNERS[2][0] + 8, CORNERS[2][1] + 19, "token b", anchor="end"),
        text(right[0] + 8, right[1] + 4, "r = 1", color=RATIO_LINE, bold=True),
        text(zero[0] + 10, zero[1] + 4, "Ḋ = 0", color=KL_LINE, bold=True),
        text(mu[0] + 16, mu[1] - 38, "D ≤ δ", size=12, color=MUTED),
    ]


def plot(
    top: float, title: str, value: Callable[[float], float], ticks: tuple[float, ...], color: str
) -> list[str]:
    """Right: one quantity along the step."""
    left, right, bottom = 545.0, 845.0, top + 105
    low, high = ticks[0], ticks[-1]

    def at(eta: float, number: float) -> Point:
        across = (eta + STEP) / (2 * STEP)
        return left + across * (right - left), bottom - (number - low) / (high - low) * 105

    curve = [at(STEP * n / 40, value(STEP * n / 40)) for n in range(-40, 41)]
    parts = [text(left - 37, top - 14, title, color=color, bold=True)]
    for tick in ticks:
        parts.append(line(at(-STEP, tick), at(STEP, tick), "#d1d9e0"))
        y = at(0, tick)[1] + 4
        parts.append(text(left - 7, y, f"{tick:.2f}", size=11, color=MUTED, anchor="end"))
    parts.append(line(at(0, low), at(0, high), MUTED, 'stroke-dasharray="3 3"'))
    parts.append(f'<path d="{path(curve)}" fill="none" stroke="{color}" stroke-width="2.2"/>')
    parts.append(dot(at(0, value(0)), INK))
    return parts


def legend() -> list[str]:
    entries = (
        (RATIO_ONLY, "only the ratio says outward"),
        (KL_ONLY, "only the derivative says outward"),
        (AGREE_OUT, "both say outward"),
        (AGREE_IN, "both say inward"),
    )
    parts = []
    for number, (color, words) in enumerate(entries):
        x, y = 30 + 205 * (number % 2), 436 + 19 * (number // 2)
        parts.append(
            f'<rect x="{x}" y="{y}" width="13" height="13" fill="{color}" stroke="{MUTED}"/>'
        )
        parts.append(text(x + 19, y + 11, words, size=12))
    return parts


def figure() -> str:
    slope = derivative(PI)
    right = [
        text(508, 34, "The step of k from π, both ways", size=15, bold=True),
        *plot(92, "r = π_k/μ_k", lambda eta: stepped(eta)[0] / MU[0], (0.5, 1.25, 2.0), RATIO_LINE),
        text(835, 172, "leaves 1 further", size=12, color=RATIO_LINE, anchor="end"),
        *plot(252, "D = KL(μ ‖ π)", lambda eta: kl(stepped(eta)), (0.65, 0.70, 0.75), KL_LINE),
        text(
            835,
            315,
            f"falls: Ḋ = {slope:.4f}".replace("-", "−"),
            size=12,
            color=KL_LINE,
            anchor="end",
        ),
        text(545, 374, f"η = −{STEP}", size=11, color=MUTED),
        text(695, 374, "0", size=11, color=MUTED, anchor="middle"),
        text(845, 374, f"{STEP}", size=11, color=MUTED, anchor="end"),
        text(545, 392, "← update with A &lt; 0", size=12),
        text(845, 392, "update with A &gt; 0 →", size=12, anchor="end"),
        text(508, 428, "A &gt; 0: the ratio vetoes the step, the derivative keeps it.", size=13),
        text(508, 448, "A &lt; 0: the ratio keeps it, the derivative vetoes.", size=13),
    ]
    body = [
        text(30, 34, "All policies π over three tokens, A &gt; 0", size=15, bold=True),
        *simplex(),
        *legend(),
        *right,
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img">',
            "<title>Where the ratio and the KL derivative disagree</title>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" '
            f'markerHeight="5" orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{INK}"/>'
            "</marker></defs>",
            # Its own paper, so that it reads alike on a light and on a dark page.
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    target = Path(__file__).with_suffix(".svg")
    target.write_text(figure(), encoding="utf-8")
    print(f"{target}: {target.stat().st_size} bytes")
