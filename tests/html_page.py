"""A page as tests read it: its tables and their exact numbers, its figures, and what is wrong with its HTML."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset(("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"))

ALONE = frozenset(("p", "h1", "h2", "h3", "figure", "table", "dl", "ul", "section", "pre", "details"))
"""Blocks that no paragraph may hold."""


@dataclass
class Cell:
    """Of a table.

    Attributes:
        text: what a reader sees.
        values: the exact numbers in it, as they stand in `data` elements.
    """

    text: str = ""
    values: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        """The only number."""
        [value] = self.values
        return float(value)


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        tables: by the attribute data-of, rows without the head.
        points: by id, the x and y of the marks of a group of a figure.
        faults: what no HTML5 page may have.
        loads: addresses that a browser would fetch.
        scripts: how many there are.
        ids: of elements.
        links: to places in the page.
        numbers: all `data` elements, in order: the exact number, and what a reader sees.
        words: all text, as it stands.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[Cell]]] = {}
        self.points: dict[str, list[tuple[float, float]]] = {}
        self.faults: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0
        self.ids: list[str] = []
        self.links: list[str] = []
        self.numbers: list[tuple[str, str]] = []
        self.source = text
        self._open: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._table: list[list[Cell]] | None = None
        self._cell: Cell | None = None
        self._head = False
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag, _ in self._open]
        self.faults += [f"the id {one} stands twice" for one in set(self.ids) if self.ids.count(one) > 1]
        self.faults += [f"nothing has the id {one}" for one in set(self.links) - set(self.ids)]
        self.loads += re.findall(r"(?:url\(|@import\s*)['\"]?(?!#)([^)'\"\s]+)", text)

    @property
    def text(self) -> str:
        """All words, single spaces between them."""
        return " ".join("".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if len(given) < len(attrs):
            self.faults.append(f"<{tag}> has an attribute twice")
        if any(name == "p" for name, _ in self._open) and tag in ALONE:
            self.faults.append(f"<{tag}> in a paragraph")
        if "id" in given:
            self.ids.append(given["id"])
        for name in ("href", "src", "xlink:href", "data", "poster", "srcset"):
            address = given.get(name, "")
            if address.startswith("#"):
                self.links.append(address[1:])
            elif address and address != "data:," and tag != "a":
                self.loads.append(address)
        self.links += re.findall(r"url\(#([^)]*)\)", " ".join(given.values()))
        for name in ("aria-labelledby", "aria-describedby"):
            self.links += given.get(name, "").split()
        self.scripts += tag == "script" or any(name.startswith("on") for name in given)
        if tag == "svg" and (given.get("role") != "img" or not given.get("aria-labelledby")):
            self.faults.append("a figure has no name")
        if tag == "use":
            group = next((name for _, name in reversed(self._open) if name), "")
            self.points.setdefault(group, []).append((float(given["x"]), float(given["y"])))
        self._table_tag(tag, given)
        if tag not in VOID:
            self._open.append((tag, given.get("id", "")))

    def _table_tag(self, tag: str, given: dict[str, str]) -> None:
        if tag == "table":
            self._table = self.tables.setdefault(given["data-of"], [])
        elif tag == "thead":
            self._head = True
        elif tag == "tr" and self._table is not None and not self._head:
            self._table.append([])
        elif tag == "td" and self._table is not None:
            self._cell = Cell()
            self._table[-1].append(self._cell)
        elif tag == "data":
            self.numbers.append((given["value"], ""))
            if self._cell is not None:
                self._cell.values.append(given["value"])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or not self._open or self._open[-1][0] != tag:
            self.faults.append(f"</{tag}> closes nothing")
            return
        self._open.pop()
        if tag == "thead":
            self._head = False
        elif tag == "table":
            self._table = None
        elif tag == "td":
            self._cell = None

    def handle_data(self, data: str) -> None:
        if any(tag == "style" for tag, _ in self._open):
            return
        self.words.append(data)
        if self._open and self._open[-1][0] == "data":
            self.numbers[-1] = (self.numbers[-1][0], data)
        if self._cell is not None:
            self._cell.text += data
