"""The URLs of storages, and what of them may be shown."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from tuner.errors import InputError

JOURNAL = "journal"
SCHEMES = ("postgresql", "mysql", "sqlite", JOURNAL)

_PASSWORDS = re.compile(r"(?<=:)[^:@/\s]*(?=@)|(?<=[?&]password=)[^&\s]*", re.IGNORECASE)
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
    return name


def masked(text: str) -> str:
    """The text with no password in any URL in it."""
    return _PASSWORDS.sub(_HIDDEN, text)


def without_password(said: str, url: str) -> str:
    """What a driver said, without the URL's password."""
    for password in passwords(url):
        said = said.replace(password, _HIDDEN)
    return masked(said)


def passwords(url: str) -> list[str]:
    """The URL's passwords as they are written there, and as they are meant."""
    try:
        own = urlsplit(url).password
    except ValueError:
        own = None
    found = [*filter(None, [own]), *(match for match in _PASSWORDS.findall(url) if match)]
    return sorted({form for password in found for form in (password, unquote(password))}, key=len, reverse=True)
