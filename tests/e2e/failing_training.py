# SPDX-License-Identifier: Apache-2.0
"""Run examples/rl/train_rl.py with a forward pass that raises, on every rank."""

import runpy
from pathlib import Path
from typing import Any, NoReturn

from megatron.rl import cpu_training

cpu_training.install()  # before anything else imports Megatron, as the example does

from megatron.rl.policy import step  # noqa: E402


def fail(*args: Any, **kwargs: Any) -> NoReturn:
    """Stand for a mistake in the model, the loss or the machine."""
    raise RuntimeError("this forward pass always fails")


if __name__ == "__main__":
    step._sum_loss = fail
    example = Path(__file__).resolve().parents[2] / "examples" / "rl" / "train_rl.py"
    runpy.run_path(str(example), run_name="__main__")
