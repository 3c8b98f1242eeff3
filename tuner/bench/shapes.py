"""The shapes that are measured: a dozen with names, or the user's own from a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import InvalidProblem
from codegen.problem import Shape
from tuner.arguments import parse_names
from tuner.errors import InputError


@dataclass(frozen=True, slots=True)
class NamedShape:
    """A shape and what tables call it."""

    name: str
    shape: Shape


NAMED = {
    "seed": Shape(4, 4, 8, 16),
    "tiny": Shape(32, 16, 64, 64),
    "small": Shape(8, 128, 256, 1024),
    "gpt2": Shape(8, 1024, 768, 2304),
    "vit": Shape(64, 197, 768, 3072),
    "bertL": Shape(16, 512, 1024, 4096),
    "gpt3": Shape(4, 2048, 4096, 12288),
    "pair": Shape(1, 262144, 128, 128),
    "pair512": Shape(1, 262144, 128, 512),
    "tall": Shape(1, 1048576, 64, 64),
    "row1": Shape(1, 1, 4096, 4096),
    "wide": Shape(1, 2048, 16384, 1024),
}
"""From a few rows to a million, with H and O narrow and wide: the projections of well-known models, and the corners."""


def parse_shapes(text: str | None) -> tuple[NamedShape, ...]:
    """The shapes that `--shapes` asks for: all named ones for None, else names with commas between them, else a file's.

    Raises:
        InputError: the text is neither, the file cannot be read, or one of its lines is no shape.
    """
    if text is None:
        return tuple(NamedShape(name, shape) for name, shape in NAMED.items())
    names = tuple(dict.fromkeys(parse_names(text)))
    if names and all(name in NAMED for name in names):
        return tuple(NamedShape(name, NAMED[name]) for name in names)
    path = Path(text)
    if not path.is_file():
        unknown = next((name for name in names if name not in NAMED), text)
        raise InputError(f"{unknown!r} is no named shape, and there is no file {text!r}; name some of {', '.join(NAMED)}, or a "
                         "file with lines such as: mine 8,128,256,1024")
    try:
        return _read(path.name, path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the shapes cannot be read from {path} ({error})") from error


def _read(file: str, lines: Iterable[str]) -> tuple[NamedShape, ...]:
    """One `name B,S,H,O` a line; what follows a # is a comment."""
    found: dict[str, NamedShape] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            name, sizes = words
            shape = Shape.parse(sizes)
        except (ValueError, InvalidProblem) as error:
            raise InputError(f"line {number} of {file} is not a name and B,S,H,O such as: mine 8,128,256,1024") from error
        if name in found:
            raise InputError(f"line {number} of {file} names a second shape {name!r}; give it another name")
        if shape.rows == 0:
            raise InputError(f"line {number} of {file}: the shape {shape} has no rows, so there is nothing to measure")
        found[name] = NamedShape(name, shape)
    if not found:
        raise InputError(f"there is no shape in {file}; write lines such as: mine 8,128,256,1024")
    return tuple(found.values())
