"""The site of docs/: complete, and strict about its links."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_retarget as rt

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs"), pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_the_site_is_built_and_asks_no_other_server(tmp_path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("index.html"))
    assert len(pages) == len(list(DOCS.rglob("*.md")))
    for page in pages:
        text = page.read_text()
        assert not re.findall(
            r"<(?:script|img|iframe)[^>]* src=\"?https?:|<link[^>]* rel=\"?stylesheet[^>]* href=\"?http", text
        )
        assert 'data-md-component="source"' not in text, "this part asks api.github.com"
        for link in re.findall(r'href="?([^"# >]+)', text):
            if not re.match("[a-z]+:|/", link):
                there = (page.parent / link).resolve()
                assert there.is_file() or (there / "index.html").is_file(), f"{page}: {link}"
    assert '<span class="gp">&gt;&gt;&gt; </span>' in (tmp_path / "api" / "values" / "index.html").read_text()


def test_a_link_to_a_missing_file_of_the_repository_fails(tmp_path):
    root = tmp_path / "root"
    shutil.copytree(DOCS, root / "docs")
    shutil.copy(ROOT / "mkdocs.yml", root)
    for page in (root / "docs" / "api").glob("*.md"):
        page.write_text("# Not today\n")
    (root / "docs" / "method.md").write_text("# The method\n\n[gone](../NOWHERE.md#part)\n")
    (root / "README.md").touch()
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    assert "method.md links to ../NOWHERE.md, which is not there" in done.stderr


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    index = (DOCS / "index.md").read_text()
    assert [page for page in listed if page != "index.md" and f"]({page})" not in index] == []


def test_every_public_name_has_its_place_on_a_page():
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: hf_retarget\.(\w+)$", text, re.MULTILINE)
    errors = {name for name in rt.__all__ if name.endswith("Error")}
    assert sorted(shown) == sorted(set(rt.__all__) - errors | {"errors"})
