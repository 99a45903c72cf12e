# SPDX-License-Identifier: Apache-2.0
"""Files of problems: JSON Lines, JSON and Parquet."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron.rl.data.problem_files import read_problems
from megatron.rl.errors import UserError
from tools.fuzzing.mutations import damaged_bytes, damaged_text, damaged_tree
from tools.fuzzing.target import WrongAnswer

ROWS: tuple[list[dict[str, Any]], ...] = (
    [{"question": f"What is {n} + 1?", "answer": f"So #### {n + 1}"} for n in range(4)],
    [{"problem": f"Halve {n}.", "answer": str(n / 2), "source": "x"} for n in range(4)],
    [
        {
            "prompt": [{"role": "user", "content": f"Double {n}."}],
            "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
            "data_source": "y",
        }
        for n in range(4)
    ],
)


class ProblemFiles:
    """What a task's ``train`` and ``heldout`` name."""

    name = "problem"
    limit_s = 60.0

    def prepare(self, folder: Path) -> None:
        """Show that the layouts are known."""
        self._folder = folder
        for rows in ROWS:
            for suffix in (".json", ".jsonl", ".parquet"):
                if not self._accepts(_encoded(rows, suffix), suffix):
                    raise WrongAnswer("a good file was refused")

    def attempt(self, rng: random.Random) -> bool:
        """Damage the rows, or the file that holds them."""
        rows: Any = rng.choice(ROWS)
        suffix = rng.choice((".json", ".jsonl", ".parquet"))
        if rng.random() < 0.5:
            rows = damaged_tree(rng, rows)
            try:
                data = _encoded(rows, suffix)
            # What arrow makes of values of several types is not our reader's fault.
            except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
                data = _encoded(rows, ".json")  # no Parquet file can hold it
        elif suffix == ".parquet" or rng.random() < 0.3:
            data = damaged_bytes(rng, _encoded(rows, suffix))
        else:
            text = damaged_text(rng, _encoded(rows, suffix).decode())
            data = text.encode("utf-8", "surrogatepass")
        return self._accepts(data, suffix)

    def close(self) -> None:
        """Nothing is open."""

    def _accepts(self, data: bytes, suffix: str) -> bool:
        path = self._folder / f"problems{suffix}"
        path.write_bytes(data)
        try:
            problems = read_problems(path)
        except UserError:
            return False
        if not problems or not all(problem.text and problem.answer for problem in problems):
            raise WrongAnswer(f"problems without text or answer: {problems[:3]!r}")
        return True


def _encoded(rows: Any, suffix: str) -> bytes:
    if suffix == ".parquet":
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), buffer)
        return buffer.getvalue()
    if suffix == ".jsonl" and isinstance(rows, list):
        return "\n".join(json.dumps(row) for row in rows).encode()
    return json.dumps(rows).encode()
