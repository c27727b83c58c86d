"""Parses the page of a report as a browser would, and checks that it is one file that loads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}
LOADING = {"script", "link", "img", "iframe", "object", "embed", "audio", "video", "use", "image", "base", "form"}


@dataclass
class Table:
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def column(self, title: str) -> list[str]:
        at = self.head.index(title)
        return [row[at] for row in self.rows]


class Page(HTMLParser):
    """Raises AssertionError for a page that is not well-formed or names something to load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.tables: list[Table] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        assert text.startswith("<!DOCTYPE html>\n")
        self.feed(text)
        self.close()
        assert not self._open

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def table(self, *head: str) -> Table:
        (found,) = [table for table in self.tables if table.head[: len(head)] == [*head]]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in LOADING
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("href", "src", "style", "action", "xlink:href", "data")
            assert "://" not in (value or "")
            assert "url(" not in (value or "")
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr" and "tbody" in self._open:
            self.tables[-1].rows.append([])
        elif tag == "th":
            self.tables[-1].head.append("")
        elif tag == "td":
            self.tables[-1].rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert data.isprintable() or not data.strip() or self._open[-1] == "style"
        if self._open and self._open[-1] == "style":
            assert not any(word in data for word in ("@import", "url(", "://"))
            return
        self.texts.append(data)
        if "th" in self._open:
            self.tables[-1].head[-1] += data
        elif "td" in self._open:
            self.tables[-1].rows[-1][-1] += data
