"""Arguments as users write them, on the command line and in Python alike."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NoReturn

from codegen.problem import Shape

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done; nothing was found, or this machine lacks something; the arguments make no sense; Ctrl-C."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")


def as_shape(shape: Shape | str | Sequence[int]) -> Shape:
    """A Shape from any of its spellings.

    Raises:
        InvalidProblem: it is none.
    """
    if isinstance(shape, Shape):
        return shape
    return Shape.parse(shape if isinstance(shape, str) else ",".join(str(size) for size in shape))


def parse_names(names: Iterable[str] | str) -> tuple[str, ...]:
    """Names from a list of them or from one text with commas: "dx, dw"."""
    return tuple(name.strip() for name in names.split(",") if name.strip()) if isinstance(names, str) else tuple(names)
