"""Elements of SVG and HTML; names of models and tensors are escaped because nothing is ever pasted as text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

Element = ElementTree.Element

# XML forbids most control characters even when escaped; a tensor name may still contain them.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def element(tag: str, *children: Element | str | None, **attributes: str | float | None) -> Element:
    """One element. Python words stand for markup words: ``class_`` for class, ``stroke_width`` for stroke-width.

    Example:
        >>> render_svg(element("text", "a < b", class_="name", x=1.5))
        '<text class="name" x="1.5">a &lt; b</text>'
    """
    node = ElementTree.Element(tag)
    for key, value in attributes.items():
        if value is not None:
            text = value if isinstance(value, str) else f"{round(value, 2):g}"
            node.set(key.rstrip("_").replace("_", "-"), _clean(text))
    for child in children:
        if isinstance(child, str):
            _add_text(node, _clean(child))
        elif child is not None:
            node.append(child)
    return node


def render_svg(node: Element) -> str:
    """The element as XML."""
    return ElementTree.tostring(node, encoding="unicode")


def render_html(node: Element) -> str:
    """The element as HTML: empty elements stay open where HTML wants it, scripts and styles are not escaped."""
    return ElementTree.tostring(node, encoding="unicode", method="html")


def _add_text(node: Element, text: str) -> None:
    if len(node):
        node[-1].tail = (node[-1].tail or "") + text
    else:
        node.text = (node.text or "") + text


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
