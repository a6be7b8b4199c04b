"""What `import hf_retarget as rt` offers is what it says it offers."""

from __future__ import annotations

import inspect
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


def test_the_version_is_a_version():
    assert [part.isdigit() for part in rt.__version__.split(".")[:2]] == [True, True]


def test_importing_the_package_does_not_import_timm():
    code = "import hf_retarget, sys; print('timm' in sys.modules, 'datasets' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
