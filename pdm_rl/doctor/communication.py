# SPDX-License-Identifier: Apache-2.0
"""Whether ranks on this machine reach each other: a small all-reduce is really done."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdm_rl.doctor.finding import Finding, error_unless
from pdm_rl.doctor.probe import COLLECTIVE, ProbeFailed, ask, store_file


def reach_finding(backend: str, ranks: int, interface: str, timeout_s: float) -> Finding:
    """Start the ranks, let them add up their numbers, compare the sum."""
    name = f"{backend} between {ranks} process{'es' if ranks > 1 else ''}"
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, ThreadPoolExecutor(ranks) as pool:
        store = store_file(Path(folder))
        asked = [
            pool.submit(ask, COLLECTIVE, backend, str(rank), str(ranks), store, timeout_s=timeout_s)
            for rank in range(ranks)
        ]
        try:
            sums = [one.result()["sum"] for one in asked]
        except ProbeFailed as error:
            return Finding("error", name, f"failed over {interface}: {error}")
    expected = ranks * (ranks + 1) / 2
    right = all(value == expected for value in sums)
    how = "a sum was right" if right else f"sums were {sums}, expected {expected}"
    return error_unless(right, name, f"{how} over {interface}")
