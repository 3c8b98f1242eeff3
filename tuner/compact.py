"""Values of which there may be thousands at a time, in little memory: runs keep a record of each candidate."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from tuner.validate import GradientError

Value = TypeVar("Value", bound=Hashable)

KEPT = 1024
"""Values of which one is kept for all that are equal."""


@lru_cache(KEPT)
def shared(value: Value) -> Value:
    """The value, or one that equals it and was here before."""
    return value


class Errors(Mapping[str, GradientError]):
    """The errors of a record by gradient, as numbers instead of objects.

    Args:
        errors: what it holds.
    """

    __slots__ = ("_names", "_numbers")

    def __init__(self, errors: Mapping[str, GradientError]) -> None:
        self._names = shared(tuple(errors))
        self._numbers = struct.pack(f"{2 * len(errors)}d", *(
            number for error in errors.values() for number in (error.normwise, error.bound_ratio)))

    def __getitem__(self, name: str) -> GradientError:
        if name not in self._names:
            raise KeyError(name)
        return GradientError(*struct.unpack_from("2d", self._numbers, 16 * self._names.index(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Errors({dict(self)})"
