"""Builds HTML and SVG from elements. Texts and attributes are escaped when the tree is written, without exception."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from llmtailor.errors import printable

Element = ET.Element
Node = ET.Element | str | None
SVG = "http://www.w3.org/2000/svg"


def element(tag: str, *children: Node, **attributes: object) -> Element:
    """Return an element; None among the children is left out, and so are attributes that are None.

    Of an attribute's name, ``_`` becomes ``-``, and one at the end goes: ``class_``, ``stroke_width``. Numbers are
    written with two digits. Control characters are made visible, because neither HTML nor XML can hold them.
    """
    made = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), _text(value))
    for child in children:
        _add(made, child)
    return made


def _add(parent: Element, child: Node) -> None:
    if isinstance(child, ET.Element):
        parent.append(child)
    elif child is not None and len(parent):
        parent[-1].tail = (parent[-1].tail or "") + printable(child)
    elif child is not None:
        parent.text = (parent.text or "") + printable(child)


def _text(value: object) -> str:
    return number(value) if isinstance(value, float) else printable(str(value))


def number(value: float) -> str:
    """Return a coordinate in as few characters as two digits need."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def path_of(commands: str) -> Element:
    """Return a path; its commands may be as long as a chart needs."""
    made = ET.Element("path")
    made.set("d", commands)
    return made


def style(rules: str) -> Element:
    """Return a style sheet, which HTML does not escape: it must come from the code, without ``<``, ``>`` and ``&``."""
    assert not set("<>&") & set(rules)
    made = ET.Element("style")
    made.text = rules
    return made


def svg(width: float, height: float, title: str, *children: Node) -> Element:
    """Return a picture that scales with its place; ``title`` is what screen readers say."""
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", *children, viewBox=box, width=width, height=height, role="img", aria_label=title)


def to_html(root: Element) -> str:
    """Return a page."""
    return "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def to_svg(root: Element) -> str:
    """Return a picture as a file of its own."""
    root.set("xmlns", SVG)
    return ET.tostring(root, encoding="unicode") + "\n"
