# SPDX-License-Identifier: Apache-2.0
"""The printed table of an evaluation."""

from collections.abc import Mapping, Sequence

from megatron.rl.evaluation.measure import BenchMetrics, Estimate

# In percent; the others are shown as they are.
_LENGTH = "response_length"


def format_table(benches: Mapping[str, BenchMetrics]) -> str:
    """Return a table: a row a metric, a column a benchmark; shares in percent, with intervals."""
    names = list(dict.fromkeys(name for b in benches.values() for name in b.estimates))
    rows = [["", *benches]]
    rows.append(["problems x samples", *(f"{b.problems} x {b.samples}" for b in benches.values())])
    for name in names:
        cells = [_cell(name, bench.estimates.get(name)) for bench in benches.values()]
        rows.append([_label(name), *cells])
    if any(bench.unscored for bench in benches.values()):
        rows.append(["not scored", *(str(bench.unscored) for bench in benches.values())])
    rows.append(["sampling error of avg %", *(_error(bench) for bench in benches.values())])
    return _aligned(rows)


def _label(name: str) -> str:
    return f"{name.replace('_', ' ')}{', tokens' if name == _LENGTH else ' %'}"


def _cell(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    scale, digits = (1.0, 0) if name == _LENGTH else (100.0, 1)
    text = f"{estimate.value * scale:.{digits}f}"
    if estimate.interval is None:
        return text
    low, high = estimate.interval.low * scale, estimate.interval.high * scale
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def _error(bench: BenchMetrics) -> str:
    return "-" if bench.sampling_stderr is None else f"{bench.sampling_stderr * 100:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)
