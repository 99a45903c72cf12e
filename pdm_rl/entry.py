# SPDX-License-Identifier: Apache-2.0
"""Where ``pdm-rl`` starts: it looks who answers to the names it is about to import."""

import sys
from collections.abc import Sequence

from pdm_rl.active_packages import find_active, import_problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``pdm-rl``; return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    problem = import_problem(find_active())
    if problem is None:
        from megatron.rl.cli import main as run

        return run(arguments)
    if arguments[:1] == ["doctor"]:
        from pdm_rl.doctor.command import main as doctor

        return doctor(arguments[1:])
    print(f"error: {problem}", file=sys.stderr)
    return 1
