"""The habits of the package: layers, sizes of files and packages, parameters of functions, one meaning per name."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import hf_retarget

ROOT = Path(hf_retarget.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the bottom to the top: each may import itself and what is below. A part that is not listed is a leaf (report,
# publish …): it may import what is below it, and of its equals those in BESIDE; the ones above may import it.
BELOW = ["errors", "untrusted", "names", "words", "files", "progress", "run", "contenders", "document_v1", "document"]
BELOW += ["advice", "hub", "recipe", "graph", "matching", "models", "data", "evaluation", "training", "adapters"]
BESIDE = {"inspection": {"report"}, "successors": {"streaming"}}
ABOVE = ["porting", "landscape", "cli", "__main__"]
LONGEST = 500  # lines; more is a sign of two subjects
MOST_FILES = 12  # in a package, __init__.py apart
UNCOUNTED = {"hf_retarget", "hf_retarget.cli", "hf_retarget.graph.rules"}
MOST_PARAMETERS = 7


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: `hf_retarget.graph.axes` belongs to `graph`."""
    return module.split(".")[1] if "." in module else ""


PARTS = {part_of(module_of(path)) for path in FILES} - {""}


def imports(source: str, package: str) -> set[str]:
    """The parts of this package that a source imports, in functions, relatively and for type checking included."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            modules |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {part_of(module) for module in modules if module.split(".")[0] == "hf_retarget"} & PARTS


def allowed(part: str) -> set[str]:
    if part in BELOW:
        return set(BELOW[: BELOW.index(part) + 1])
    if part in ABOVE:
        return PARTS - set(ABOVE[ABOVE.index(part) + 1 :])
    return PARTS - {"cli"} if part == "" else {*BELOW, part, *BESIDE.get(part, ())}


def test_there_are_parts():
    assert {"errors", "graph", "models", "inspection", "cli"} <= PARTS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import hf_retarget.graph.axes", {"graph"}),
        ("from hf_retarget import errors, graph", {"errors", "graph"}),
        ("from hf_retarget.graph import Axis", {"graph"}),
        ("from . import trace", {"graph"}),
        ("from ..errors import RuleError", {"errors"}),
        ("from .. import cli", {"cli"}),
        ("def late():\n    from hf_retarget.cli import main", {"cli"}),
        ("import torch, hf_retarget_other.cli\nfrom hf_retarget import __version__", set()),
    ],
)
def test_imports_are_seen(source, expected):
    assert imports(source, "hf_retarget.graph") == expected


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_downwards(path):
    part = part_of(module_of(path))
    wrong = imports(path.read_text(encoding="utf-8"), package_of(path)) - allowed(part)
    assert not wrong, f"{module_of(path)} belongs to '{part}' and imports {sorted(wrong)}"


def test_nothing_below_imports_what_is_above():
    assert not {"cli", "inspection", "models", "matching"} & allowed("graph")
    assert not any("cli" in allowed(part) for part in PARTS - {"cli", "__main__"})


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_starts_with_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{module_of(path)} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_there_is_no_drawer_for_everything():
    assert [module_of(path) for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")] == []


def test_packages_stay_small():
    counts = Counter(package_of(path) for path in FILES if path.name != "__init__.py")
    assert {name: count for name, count in counts.items() if count > MOST_FILES and name not in UNCOUNTED} == {}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_functions_have_few_parameters(path):
    """More need a comment beside the name that gives the reason."""
    source = path.read_text(encoding="utf-8")
    lines, many = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and "#" not in lines[node.lineno - 1]:
            given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            many += [node.name] if len(given) - (given[:1] in (["self"], ["cls"])) > MOST_PARAMETERS else []
    assert many == []


def test_a_name_means_one_thing():
    """Commands bear the names of the functions that they call, and rules those of operators."""
    places: dict[str, set[str]] = {}
    for path in FILES:
        if package_of(path) not in ("hf_retarget.cli", "hf_retarget.graph.rules"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                    places.setdefault(node.name, set()).add(module_of(path))
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}
