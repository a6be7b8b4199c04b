"""The layers of the package: who may import whom, and how large a file may grow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_retarget

ROOT = Path(hf_retarget.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the bottom to the top: a module may import its own layer and the ones before it. What is not listed is a leaf
# between `graph` and `cli`: it may import the layers below, and of its equals nothing but itself.
BOTTOM = ("errors", "files")
TOP = ("cli",)
LONGEST = 350  # lines


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The part of the package that a module belongs to: `hf_retarget.graph.axes` belongs to `graph`."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    """All modules of this package that a file imports, inside functions and for type checking as well."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            found |= (
                {module, *(f"{module}.{alias.name}" for alias in node.names)} if module == "hf_retarget" else {module}
            )
    return {name for name in found if name == "hf_retarget" or name.startswith("hf_retarget.")}


def allowed(layer: str) -> set[str]:
    if layer in BOTTOM:
        return set(BOTTOM[: BOTTOM.index(layer) + 1])
    if layer == "graph":
        return {*BOTTOM, "graph"}
    if layer in ("", "__main__", *TOP):
        return {layer_of(module_of(path)) for path in FILES}
    return {*BOTTOM, "graph", layer} | ({"matching", "models"} if layer == "matching" else set())


def test_there_are_files():
    assert {"errors", "graph", "models", "inspect", "cli"} <= {layer_of(module_of(path)) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_downwards(path):
    layer = layer_of(module_of(path))
    layers = {layer_of(name) for name in imports(path)} & {layer_of(module_of(file)) for file in FILES} - {""}
    assert layers <= allowed(layer), f"{module_of(path)} imports {sorted(layers - allowed(layer))}"


def test_only_the_command_line_imports_itself():
    outside = [path for path in FILES if layer_of(module_of(path)) not in ("cli", "__main__")]
    assert [module_of(path) for path in outside if "cli" in map(layer_of, imports(path))] == []


def test_relative_and_late_imports_are_seen(tmp_path):
    path = ROOT / "graph" / "imaginary.py"
    package = module_of(path).rpartition(".")[0]
    assert package == "hf_retarget.graph"
    assert imports(ROOT / "graph" / "trace.py") >= {"hf_retarget.graph.build", "hf_retarget.errors"}
    assert layer_of("hf_retarget.graph.rules.shape") == "graph"
    assert layer_of("hf_retarget") == ""


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_starts_with_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{module_of(path)} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_there_is_no_drawer_for_everything():
    assert [module_of(path) for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")] == []
