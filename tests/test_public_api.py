"""What `import hf_retarget as rt` offers is what it says it offers."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys

import pytest

import hf_retarget as rt
from hf_retarget import errors


def test_names_are_sorted_and_there_once():
    assert list(rt.__all__) == sorted(set(rt.__all__), key=lambda name: (not name[0].isupper(), name))


@pytest.mark.parametrize("name", rt.__all__)
def test_every_name_exists_and_is_explained(name):
    value = getattr(rt, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert value.__module__.startswith("hf_retarget.")
    assert "\n" not in inspect.getdoc(value).strip().partition("\n\n")[0], "a docstring begins with one line"


@pytest.mark.parametrize("name", [name for name in rt.__all__ if inspect.isfunction(getattr(rt, name))])
def test_functions_are_typed_and_documented(name):
    function = getattr(rt, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())
    assert function.__doc__


def test_all_names_come_with_a_star():
    names: dict = {}
    exec("from hf_retarget import *", names)
    assert set(rt.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        rt.no_such_name  # noqa: B018


def test_all_errors_are_public_and_of_one_family():
    found = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert found == {name for name in rt.__all__ if name.endswith("Error")}
    assert all(issubclass(getattr(errors, name), rt.RetargetError) for name in found)
    assert all(name in errors.__doc__ for name in found), "the module draws the hierarchy"


def test_no_function_shares_its_name_with_a_module():
    # A submodule becomes an attribute of its package as soon as it is imported, and would hide the function.
    modules = {each.name for each in pkgutil.iter_modules(rt.__path__)}
    functions = {name for name in rt.__all__ if inspect.isfunction(getattr(rt, name))}
    assert {"port", "finetune", "evaluate", "compare", "plane", "check"} <= functions
    assert functions & modules == set()


def test_the_version_is_a_version():
    assert [part.isdigit() for part in rt.__version__.split(".")[:2]] == [True, True]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("port", ("old", "tuned", "new")),
        ("check", ("old", "tuned", "new")),
        ("port_all", ("old", "new")),
        ("finetune", ("model",)),
        ("evaluate", ("model",)),
        ("plane", (["one", "two"],)),
    ],
)
def test_an_unknown_option_is_refused_with_the_closest(name, given, tmp_path):
    out = {"out": tmp_path / "out"} if name in ("port", "port_all", "finetune") else {}
    with pytest.raises(TypeError, match="'devise'; did you mean 'device'"):
        getattr(rt, name)(*given, devise="cpu", **out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["contenders", "document", "names", "run", "words"])
def test_what_help_and_pages_need_imports_no_torch(module):
    code = f"import sys, hf_retarget.{module}; sys.exit(bool({{'torch', 'timm', 'rich'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_does_not_import_timm():
    code = "import hf_retarget, sys; print('timm' in sys.modules, 'datasets' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
