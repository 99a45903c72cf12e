# SPDX-License-Identifier: Apache-2.0
"""Which folders answer to ``megatron.rl``, ``pdm`` and ``megatron.core``; no code of them is run.

``megatron`` is a namespace that several folders share; of two ``megatron.rl`` the first on the path
is used, silently. A package manager named PDM installs a package ``pdm``.
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

OWN_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class ActivePackages:
    """The file, or the folder, of each package that an import would take; None where none.

    Attributes:
        megatron_file: the file that makes ``megatron`` a regular package; None for a namespace.
        pdm_manager: the version of the PDM package manager, where it is installed here.
    """

    megatron_file: str | None
    megatron_rl: str | None
    megatron_core: str | None
    pdm: str | None
    pdm_manager: str | None


def find_active() -> ActivePackages:
    """Look along this interpreter's path."""
    regular = _place("megatron", folders=False)
    # Looking inside a regular package would run it.
    inside = regular is None
    return ActivePackages(
        megatron_file=regular,
        megatron_rl=_place("megatron.rl") if inside else None,
        megatron_core=_place("megatron.core") if inside else None,
        pdm=_place("pdm"),
        pdm_manager=_version("pdm"),
    )


def import_problem(active: ActivePackages) -> str | None:
    """Say why this project's packages cannot be imported, and what to do; None when they can."""
    own_rl, own_pdm = (str(OWN_ROOT / name / "__init__.py") for name in ("megatron/rl", "pdm"))
    first = f"put this project first: PYTHONPATH={OWN_ROOT}:$PYTHONPATH"
    if active.megatron_file is not None:
        return (
            f"{active.megatron_file} makes megatron a regular package, which hides every other "
            "folder of it. Remove that file: Megatron-Core has none"
        )
    if active.megatron_rl is None:
        return f"no megatron.rl is on the path: install this project, or set PYTHONPATH={OWN_ROOT}"
    if active.megatron_rl != own_rl:
        return (
            f"another megatron.rl is active, {active.megatron_rl}: it comes before {own_rl}, as a "
            f"checkout of Megatron-LM on PYTHONPATH does. To mend it, {first}"
        )
    if active.pdm != own_pdm:
        return (
            f"another package pdm is active, {active.pdm}: it comes before {own_pdm}. If it is the "
            f"PDM package manager, install that outside of this environment; otherwise, {first}"
        )
    if active.pdm_manager is not None:
        return (
            f"the PDM package manager {active.pdm_manager} is installed in this environment, and "
            "its package has the name of this project's pdm: uninstall it here, install this "
            "project again, and keep PDM in an environment of its own"
        )
    return None


def _place(name: str, *, folders: bool = True) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None or not (spec.origin or folders):
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
