# SPDX-License-Identifier: Apache-2.0
"""The NCCL that torch brings along, as far as it goes without a GPU: finding it, its version."""

import os
import subprocess
import sys

import pytest
import torch

from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.rollout.transfer.nccl_library import (
    PATH_VARIABLE,
    NcclLibrary,
    check_same_version,
    engine_library_version,
    loaded_library_path,
    version_text,
)

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch is not built for CUDA and has no NCCL"
)


def test_it_is_the_library_of_torch() -> None:
    library = NcclLibrary(loaded_library_path())
    assert os.path.isfile(library.path)
    major, minor, patch = torch.cuda.nccl.version()
    assert library.version() == 10000 * major + 100 * minor + patch
    assert version_text(library.version()) == f"{major}.{minor}.{patch}"


def test_another_process_finds_it_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine's does, which need not have torch's library on its path."""
    path = loaded_library_path()
    code = (
        "from megatron.rl.rollout.transfer.nccl_library import engine_library_version\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "print(engine_library_version())"
    )
    environment = os.environ | {PATH_VARIABLE: path}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(answer.stdout) == NcclLibrary(path).version()
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    assert engine_library_version() == 0


def test_a_library_found_by_name_says_where_it_is() -> None:
    torch.cuda.nccl.version()
    assert NcclLibrary("libnccl.so.2").path == loaded_library_path()
    assert os.path.isfile(loaded_library_path())


def test_two_versions_are_refused() -> None:
    check_same_version(22907, 22907, "/x/libnccl.so.2")
    for engine, shown in ((22805, "2.28.5"), (0, "unknown")):
        with pytest.raises(EngineConfigError, match=rf"trainer's NCCL is 2\.29\.7.*{shown}"):
            check_same_version(22907, engine, "/x/libnccl.so.2")


def test_no_library_and_no_nccl(tmp_path) -> None:
    with pytest.raises(EngineConfigError, match="no NCCL at"):
        NcclLibrary(str(tmp_path / "libnccl.so.2"))
    with pytest.raises(EngineConfigError, match="no NCCL at"):
        NcclLibrary("libc.so.6")  # loads, and has none of the functions
