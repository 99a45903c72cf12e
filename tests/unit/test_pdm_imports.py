# SPDX-License-Identifier: Apache-2.0
"""What importing `pdm` costs, at run time; test_import_direction.py reads the source."""

import subprocess
import sys
from pathlib import Path

import pdm

PACKAGE = Path(pdm.__file__).parent


def test_importing_pdm_loads_torch_and_nothing_else() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import pdm; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'torch', 'pdm'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_the_public_names_exist() -> None:
    assert pdm.__all__ == sorted(pdm.__all__)
    assert all(hasattr(pdm, name) for name in pdm.__all__)


def test_only_vocab_parallel_communicates() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "vocab_parallel":
            assert "torch.distributed" not in path.read_text(), path
