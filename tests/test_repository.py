"""What a contributor expects in a repository: hooks, templates, updates, a checklist, and a list of all targets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import hf_retarget

ROOT = Path(hf_retarget.__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").is_file(), reason="an installed package has none of this")


def test_make_help_lists_every_target_with_a_line():
    targets = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True)
    listed = dict(re.findall(r"^  make (\S+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(listed) == {name for line in targets for name in line.split()}
    assert all(listed.values())


def test_hooks_do_what_make_check_does():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    for tool in ("ruff format", "ruff check", "mypy"):
        assert any(entry.startswith(f".venv/bin/{tool}") for entry in entries)
    checks = (ROOT / "Makefile").read_text()
    assert all(f"$(BIN)/{tool}" in checks for tool in ("ruff format", "ruff check", "mypy"))


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_files_for_github_are_yaml(path):
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert {"name", "description", "body"} <= set(content)
        assert all(part["type"] in ("textarea", "input", "markdown") for part in content["body"])


def test_templates_and_checklists_are_there():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert [each["package-ecosystem"] for each in updates] == ["pip", "github-actions"]
    assert "make check" in (ROOT / ".github/pull_request_template.md").read_text()
    steps = re.findall(r"^\d+\. ", (ROOT / "RELEASING.md").read_text(), re.MULTILINE)
    assert len(steps) >= 6
    assert "RELEASING.md" in (ROOT / "CONTRIBUTING.md").read_text()
