"""What the command lines have in common."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

USAGE = 2
"""Exit code: the arguments make no sense."""

_SIZES = re.compile(r"-\d+[,x]")
"""How sizes begin of which the first is negative: argparse takes them for an option, and then says that a value is missing."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, and that knows sizes such as -1,4,8,16 for a value."""

    def parse_known_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                         namespace: Any = None) -> tuple[Any, list[str]]:
        """As ArgumentParser.parse_known_args."""
        return super().parse_known_args(list(_joined(sys.argv[1:] if args is None else args)), namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(USAGE, f"{self.prog}: {message}\n")


def abandon_output() -> None:
    """Nothing more goes to standard output, which cannot be written: what its buffer holds could not be at exit either."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def _joined(words: Iterable[str]) -> Iterator[str]:
    """The words; an option and the sizes behind it are one."""
    option = None
    for word in words:
        if option is not None and _SIZES.match(word):
            word = f"{option}={word}"
        elif option is not None:
            yield option
        option = word if re.fullmatch(r"--[\w-]+", word) else None
        if option is None:
            yield word
    if option is not None:
        yield option
