# SPDX-License-Identifier: Apache-2.0
"""Every public function has a property test, and a docstring that tells shapes and source."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pdm
import pdm.functional
from pdm import BehaviorSupport


def public_functions() -> dict[str, Callable[..., object]]:
    """Every public function of `pdm` and `pdm.functional`, by its full name."""
    found = {
        f"{package.__name__}.{name}": getattr(package, name)
        for package in (pdm, pdm.functional)
        for name in package.__all__
    }
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def names_in_property_tests(path: Path) -> Iterator[str]:
    """Names that the @given tests of a file use, directly or through helpers of that file."""
    tree = ast.parse(path.read_text())
    helpers = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting: list[ast.AST] = [
        node for node in helpers.values() if "given" in ast.dump(ast.List(node.decorator_list))
    ]
    seen: set[str] = set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                yield node.id
                if node.id in helpers:
                    waiting.append(helpers[node.id])


def test_every_public_function_has_a_property_test() -> None:
    tested = {
        name
        for path in Path(__file__).parent.glob("test_pdm_*.py")
        for name in names_in_property_tests(path)
    }
    functions = [name for name in pdm.__all__ if inspect.isfunction(getattr(pdm, name))]
    missing = sorted(set(functions) - tested)
    assert not missing, f"no @given test in tests/unit/test_pdm_*.py uses {missing}"


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_docstrings_tell_shapes_gradient_and_source(name: str) -> None:
    function = public_functions()[name]
    text = inspect.getdoc(function) or ""
    takes_tensors = any(
        "Tensor" in str(value) for value in inspect.get_annotations(function).values()
    )
    sections = re.split(r"^(Shapes|Gradient|Edge cases|Source): ", text, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert text and text.splitlines()[0].endswith("."), "a sentence that says what it does"
    assert list(found) == sorted(found, key=["Shapes", "Gradient", "Edge cases", "Source"].index)
    assert {"Shapes", "Source"} <= set(found)
    assert re.search(
        r"Eq\. \d|[Ss]ections? [\dA-Z]|Appendix|Theorem|Lemma|Table|\b20\d\d\b|`", found["Source"]
    )
    if takes_tensors:
        assert "Gradient" in found
        assert re.search(r"\[[\w., ()+-]+\]|scalar|elementwise|\[\]", found["Shapes"])


@pytest.mark.parametrize("constructor", ["from_topk", "from_sampled"])
def test_constructors_have_docstrings_too(constructor: str) -> None:
    text = inspect.getdoc(getattr(BehaviorSupport, constructor)) or ""
    assert all(f"\n{section}: " in text for section in ("Shapes", "Gradient", "Source"))
