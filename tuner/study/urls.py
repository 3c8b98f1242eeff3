"""The URLs of storages, and what of them may be shown."""

from __future__ import annotations

import re
from urllib.parse import unquote

from tuner.errors import InputError

JOURNAL = "journal"
SCHEMES = ("postgresql", "mysql", "sqlite", JOURNAL)

_PASSWORDS = (re.compile(r"(://[^:@/]*:)(.*)(?=@)", re.DOTALL), re.compile(r"([?&]password=)([^&]*)", re.IGNORECASE))
"""What stands before a password, and the password. One that holds what it should escape is hidden with whatever follows it."""

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


def masked(url: str) -> str:
    """The URL, or an argument with one in it, without its password."""
    for pattern in _PASSWORDS:
        url = pattern.sub(rf"\g<1>{_HIDDEN}", url)
    return url


def without_password(said: str, url: str) -> str:
    """What a driver said, without the URL's password: neither as it is written there nor as it is meant."""
    found = {found[2] for pattern in _PASSWORDS if (found := pattern.search(url)) and found[2]}
    for password in sorted({form for one in found for form in (one, unquote(one))}, key=len, reverse=True):
        said = said.replace(password, _HIDDEN)
    return said
