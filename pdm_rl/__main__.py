# SPDX-License-Identifier: Apache-2.0
"""``python -m pdm_rl``, or this file by its path where the project is not installed."""

import sys
from pathlib import Path

if not __package__:
    # For this package alone: what else is found has to be what any program here would find.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    del sys.path[0]

from pdm_rl.entry import main

if __name__ == "__main__":
    sys.exit(main())
