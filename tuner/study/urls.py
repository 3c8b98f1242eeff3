"""The URLs of storages, and what of them may be shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

from tuner.errors import InputError

JOURNAL = "journal"
SCHEMES = ("postgresql", "mysql", "sqlite", JOURNAL)

_PASSWORDS = (
    re.compile(r"(?<!\bsqlite)(?<!\bjournal):/*[^:/]*:(.*)(?=@)", re.DOTALL),
    re.compile(r"[?&][^=&]*(?:pass|pwd|secret|token|key)[^=&]*=([^&]*)", re.IGNORECASE))
"""Where a password is: between the first colon of the authority and its last @, and in the query under any name that may stand
for one. What should have been escaped in it is hidden with it, and more than that rather than less."""

_HIDDEN = "***"


def check_url(url: str) -> str:
    """The scheme of a storage's URL, without the driver.

    Raises:
        InputError: it names no storage.
    """
    scheme, colon, rest = url.partition(":")
    name = scheme.partition("+")[0]
    slashes = {JOURNAL: "", "sqlite": "///"}.get(name, "//")
    if name not in SCHEMES or not colon or not rest.startswith(slashes) or len(rest) == len(slashes):
        raise InputError(f"--storage {masked(url)!r} is none of postgresql://USER:PASSWORD@HOST/DATABASE, "
                         "mysql://USER:PASSWORD@HOST/DATABASE, sqlite:///FILE and journal:FILE")
    if name == "sqlite" and ":memory:" in rest:
        raise InputError("--storage sqlite:///:memory: is seen by no other process; name a file with sqlite:///FILE")
    return name


def masked(url: str) -> str:
    """The URL, or an argument with one in it, without its passwords."""
    shown, end = "", 0
    for first, last in sorted(match.span(1) for match in _found(url)):
        if first >= end:
            shown += url[end:first] + _HIDDEN
        end = max(end, last)
    return shown + url[end:]


def without_password(said: str, url: str) -> str:
    """What a driver said, without the URL's passwords: neither as they are written there nor as they are meant."""
    forms = {form for match in _found(url) for form in (match[1], unquote(match[1]), unquote_plus(match[1]))}
    for password in sorted(forms, key=len, reverse=True):
        said = said.replace(password, _HIDDEN)
    return said


def _found(url: str) -> Iterator[re.Match[str]]:
    return (match for pattern in _PASSWORDS for match in pattern.finditer(url) if match[1])
