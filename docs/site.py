"""What the site in mkdocs.yml needs besides the pages: links to files outside docs/, and examples in docstrings."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("mkdocs.site")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to the repository's other files (`../CONTRIBUTING.md`) lead to GitHub, if the files are there."""
    folder = Path(page.file.abs_src_path).parent

    def lead(found: re.Match[str]) -> str:
        path, anchor = found["path"], found["anchor"] or ""
        target = (folder / path).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not target.is_relative_to(ROOT) or not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, path)  # strict: it fails
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.extra['social'][0]['link']}/{kind}/main/{target.relative_to(ROOT).as_posix()}{anchor})"

    return re.sub(r"\]\((?P<path>\.\.?/[^)#\s]+)(?P<anchor>#[^)\s]*)?\)", lead, markdown)


class Examples(griffe.Extension):
    """Docstrings say `Example:` above one; the parser knows only the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
