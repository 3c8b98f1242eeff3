"""Leaves the helpers out of a rendered source that nothing in it uses: pieces of templates are included whole."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HELPER = re.compile(r"template <|__device__ |struct |constexpr \w+ \w+\(")
_NAME = re.compile(r"(?:^|\n)struct (?:alignas\(.*\) )?(\w+)|(\w+)\(")
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"//.*")
_EMPTY_SECTION = re.compile(r"#ifdef \w+\n(?:(?://.*)?\n)*#endif\n")


@dataclass(frozen=True, slots=True)
class _Item:
    """A helper, or a line that is part of none.

    Attributes:
        lines: its text.
        name: of the helper, a function or a structure; empty for anything else.
        words: the identifiers in it, those of comments left out.
    """

    lines: tuple[str, ...]
    name: str
    words: frozenset[str]

    @property
    def is_comment(self) -> bool:
        return self.lines[0].startswith("//")


def prune(text: str) -> str:
    """The source without the functions and structures that no kernel reaches, and without the comments on them.

    It relies on how the templates are written. A definition begins in the first column and ends with the line that closes its
    braces. The comment right above a definition is on it and on those that follow up to the next comment, or to a line that is
    part of no helper, such as an empty one. Helpers of one name stay or go together.
    """
    items = list(_items(text.split("\n")))
    named = defaultdict(list)
    for item in items:
        named[item.name].append(item)
    used: set[str] = set()
    reached = named.pop("")
    while reached:
        found = frozenset().union(*(item.words for item in reached)) - used
        used |= found
        reached = [item for word in found for item in named.get(word, ())]
    lines: list[str] = []
    for comments, helpers in _paragraphs(items):
        staying = [item for item in helpers if not item.name or item.name in used]
        if staying or not helpers:
            lines += (line for item in (*comments, *staying) for line in item.lines)
    return re.sub(r"\n{3,}", "\n\n", _EMPTY_SECTION.sub("", "\n".join(lines)))


def _paragraphs(items: Sequence[_Item]) -> Iterator[tuple[list[_Item], list[_Item]]]:
    """Comments and the helpers they are on; any other line is alone, without a comment of its own."""
    comments: list[_Item] = []
    helpers: list[_Item] = []
    for item in items:
        if (helpers and not item.name) or (comments and not (item.name or item.is_comment)):
            yield comments, helpers
            comments, helpers = [], []
        if item.is_comment:
            comments.append(item)
        elif item.name:
            helpers.append(item)
        else:
            yield [], [item]
    yield comments, helpers


def _items(lines: Sequence[str]) -> Iterator[_Item]:
    at = 0
    while at < len(lines):
        first = at
        at += 1
        if _HELPER.match(lines[first]):
            while not _is_complete(lines[first:at]):
                at += 1
        body = _COMMENT.sub("", "\n".join(lines[first:at]))
        found = _NAME.search(body) if _HELPER.match(body) else None
        yield _Item(tuple(lines[first:at]), (found[1] or found[2]) if found else "", frozenset(_WORD.findall(body)))


def _is_complete(lines: Sequence[str]) -> bool:
    """Whether a definition ends with these lines."""
    text = _COMMENT.sub("", "\n".join(lines)).rstrip()
    return text.endswith(("}", ";")) and text.count("{") == text.count("}")
