# SPDX-License-Identifier: Apache-2.0
"""Imports point one way: pdm (torch only), then megatron.rl, then examples and tools.

Read from the source, so that imports inside functions count too.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT_FOLDERS = ("pdm", "pdm_rl", "megatron", "tests", "tools", "examples", "benchmarks")

# Lower layers of pdm know nothing of higher ones. The longest prefix decides.
PDM_LAYERS = {
    "pdm.support": 0,
    "pdm.statistics": 0,
    "pdm.vocab_parallel.shard": 0,
    "pdm.functional": 1,
    "pdm.vocab_parallel": 2,
    "pdm.kernels": 2,
    "pdm.loss": 3,
    "pdm.analysis": 4,
    "pdm": 5,
}
# A package's __init__ runs with its lowest module, and this one is imported by everybody's
# lowest layer: it may offer nothing but the shard.
BELOW_ITS_FOLDER = {"pdm.vocab_parallel": 0}

# Where the rollout engine's process enters. It may run under a Python without Megatron-Core.
# vLLM loads the receivers by name, from vllm_plugin.py.
WORKER_ENTRIES = (
    "megatron.rl.rollout.worker.process",
    "megatron.rl.rollout.worker.worker_extension",
    "megatron.rl.rollout.worker.weight_receiver",
    "megatron.rl.rollout.worker.gpu_receivers",
)


@dataclass(frozen=True)
class Import:
    name: str  # absolute, and down to a module of the project where it names one
    line: int
    at_import_time: bool  # outside functions and TYPE_CHECKING blocks

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    def inside(self, *packages: str) -> bool:
        return any(
            self.name == package or self.name.startswith(f"{package}.") for package in packages
        )


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def project_files() -> dict[str, Path]:
    paths = [path for folder in PROJECT_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    paths += ROOT.glob("*.py")
    return {module_name(path): path for path in sorted(paths)}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(module: str, path: Path, known: frozenset[str]) -> list[Import]:
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def names(node: ast.AST) -> list[str]:
        match node:
            case ast.Import():
                return [alias.name for alias in node.names]
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                stem = ".".join([*base, *(node.module or "").split(".")]).strip(".")
                full = [f"{stem}.{alias.name}" for alias in node.names]
                return [name if name in known else stem for name in full]
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(node.func) in (
                    "importlib.import_module",
                    "import_module",
                    "__import__",
                ):
                    return [name]
        return []

    def walk(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for name in names(child):
                yield Import(name, child.lineno, at_import_time)  # type: ignore[attr-defined]
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_import_time and not deferred and not is_type_checking(child))

    return list(walk(ast.parse(path.read_text()), True))


FILES = project_files()
IMPORTS = {name: imports_of(name, path, frozenset(FILES)) for name, path in FILES.items()}


def modules_in(*packages: str) -> list[str]:
    return [name for name in FILES if Import(name, 0, True).inside(*packages)]


def offences(modules: list[str], forbidden: Callable[[str, Import], bool]) -> list[str]:
    return [
        f"{FILES[module].relative_to(ROOT)}:{found.line} imports {found.name}"
        for module in modules
        for found in IMPORTS[module]
        if forbidden(module, found)
    ]


def reach(entries: tuple[str, ...]) -> set[str]:
    """Project modules that importing and using the entries can load, with their packages."""
    seen: set[str] = set()
    waiting = [name for name in entries if name in FILES]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        targets = [module] + [found.name for found in IMPORTS[module]]
        for target in targets:
            parts = target.split(".")
            prefixes = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
            waiting += [prefix for prefix in prefixes if prefix in FILES]
    return seen


def layer(module: str, *, imported: bool) -> int:
    if module in BELOW_ITS_FOLDER and (not imported or FILES[module].name == "__init__.py"):
        return BELOW_ITS_FOLDER[module]
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(PDM_LAYERS[prefix] for prefix in prefixes if prefix in PDM_LAYERS)


def test_the_source_was_found() -> None:
    assert modules_in("pdm") and modules_in("megatron.rl")


def test_megatron_stays_a_namespace_package() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists(), "it would hide megatron-core"


def test_pdm_needs_torch_only() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "pdm"}
    never = {"megatron", "vllm", "transformers"}

    def forbidden(module: str, found: Import) -> bool:
        if found.top == "triton":
            # A kernel's file may; nobody may load that file before it is needed (next test).
            return found.at_import_time and not module.startswith("pdm.kernels.")
        return found.top in never or (found.at_import_time and found.top not in allowed)

    assert offences(modules_in("pdm"), forbidden) == []


def test_files_that_need_triton_are_loaded_late() -> None:
    kernels = {
        module
        for module in modules_in("pdm.kernels")
        if any(found.top == "triton" and found.at_import_time for found in IMPORTS[module])
    }

    def forbidden(module: str, found: Import) -> bool:
        return found.at_import_time and found.name in kernels and module not in kernels

    assert offences(modules_in("pdm", "megatron.rl"), forbidden) == []


def test_layers_of_pdm() -> None:
    def forbidden(module: str, found: Import) -> bool:
        if found.top != "pdm":
            return False
        return layer(found.name, imported=True) > layer(module, imported=False)

    assert offences(modules_in("pdm"), forbidden) == []


def test_functional_is_pure() -> None:
    def forbidden(module: str, found: Import) -> bool:
        return found.inside(
            "pdm.vocab_parallel", "pdm.kernels", "pdm.loss", "pdm.analysis", "torch.distributed"
        )

    assert offences(modules_in("pdm.functional"), forbidden) == []


def test_only_the_trainer_knows_megatron_and_vllm() -> None:
    outside = [name for name in FILES if not name.startswith(("megatron.rl", "tests", "tools"))]
    # The entry imports the trainer once it has seen that it is this one.
    above = ("pdm_rl", "examples", "benchmarks")
    outside = [name for name in outside if not name.startswith(above)]
    assert offences(outside, lambda _, found: found.inside("megatron", "vllm")) == []


def test_the_entry_needs_the_standard_library_only() -> None:
    """It has to start where nothing else can be imported."""
    allowed = {*sys.stdlib_module_names, "pdm_rl"}

    def forbidden(module: str, found: Import) -> bool:
        return found.at_import_time and found.top not in allowed

    assert modules_in("pdm_rl")
    assert offences(modules_in("pdm_rl"), forbidden) == []


def test_nothing_below_knows_what_is_above() -> None:
    above = ("examples", "tools", "tests", "benchmarks")
    modules = modules_in("pdm", "pdm_rl", "megatron.rl")
    assert offences(modules, lambda _, found: found.inside(*above)) == []


def test_vllm_is_imported_only_in_the_engine_process() -> None:
    worker_side = {
        name for name in reach(WORKER_ENTRIES) if name.startswith("megatron.rl.rollout.")
    }
    trainer_side = [name for name in modules_in("megatron.rl") if name not in worker_side]
    assert offences(trainer_side, lambda _, found: found.inside("vllm")) == []
    assert offences(trainer_side, lambda _, found: found.name in WORKER_ENTRIES) == []


def test_the_engine_process_needs_no_megatron_core() -> None:
    needs = ("megatron.core", "megatron.training")
    modules = sorted(reach(WORKER_ENTRIES))
    assert offences(modules, lambda _, found: found.inside(*needs)) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import vllm.inputs as x", [("vllm.inputs", True)]),
        ("from . import wire", [("megatron.rl.rollout.wire", True)]),
        ("from ..config import Config", [("megatron.rl.config", True)]),
        (
            "from megatron.rl.rollout import wire, other",
            [("megatron.rl.rollout.wire", True), ("megatron.rl.rollout", True)],
        ),
        ("def f():\n    import triton", [("triton", False)]),
        ("class C:\n    import triton", [("triton", True)]),
        ("try:\n    import triton\nexcept ImportError:\n    pass", [("triton", True)]),
        ("if TYPE_CHECKING:\n    import vllm", [("vllm", False)]),
        ("x = importlib.import_module('vllm')", [("vllm", True)]),
    ],
)
def test_how_imports_are_read(
    tmp_path: Path, source: str, expected: list[tuple[str, bool]]
) -> None:
    path = tmp_path / "protocol.py"
    path.write_text(source)
    known = frozenset({"megatron.rl.rollout.wire", "megatron.rl.config"})
    found = imports_of("megatron.rl.rollout.protocol", path, known)
    assert [(item.name, item.at_import_time) for item in found] == expected
