"""The shapes that are measured: a dozen with names, or the user's own, written out or in a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import InvalidProblem
from codegen.problem import Shape
from tuner.arguments import parse_names
from tuner.errors import InputError, why


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

SIZES = re.compile(r"[0-9]+([x,] *[0-9]+){3}")
"""What is meant to be a shape, whether or not its sizes can be."""


def parse_shapes(texts: Sequence[str] | None) -> tuple[NamedShape, ...]:
    """The shapes that `--shapes` asks for, all named ones for None; what is asked for twice is taken once.

    Args:
        texts: one for each time the option stands there. A text has parts with `;` between them, and each part is B,S,H,O, or
            a file, or names and shapes such as 4x4x8x16 with commas between them.

    Raises:
        InputError: a part is none of these, a file cannot be read, one of its lines is no shape, or two shapes have one name.
        InvalidProblem: sizes that are written out are none.
    """
    if texts is None:
        return tuple(NamedShape(name, shape) for name, shape in NAMED.items())
    found: dict[str, NamedShape] = {}
    for part in (part.strip() for text in texts for part in text.split(";")):
        for named in _part(part):
            if found.setdefault(named.name, named) != named:
                raise InputError(f"two shapes are called {named.name!r}: {found[named.name].shape} and {named.shape}; rename one")
    return tuple(found.values())


def _part(text: str) -> tuple[NamedShape, ...]:
    if (single := _word(text)) is not None:
        return (single,)
    names = parse_names(text)
    words = [_word(name) for name in names]
    if words and None not in words:
        return tuple(word for word in words if word is not None)
    path = Path(text)
    if not path.is_file():
        unknown = next((name for name, word in zip(names, words, strict=True) if word is None), text)
        raise InputError(f"{unknown!r} is no shape, no name of one, and there is no file {text!r}; write B,S,H,O (several with ; "
                         f"between them), or some of {', '.join(NAMED)}, or a file with lines such as: mine 8,128,256,1024")
    try:
        return _read(path.name, path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the shapes cannot be read from {path} ({why(error)})") from error


def _word(text: str) -> NamedShape | None:
    """A named shape, or one that is written out and called by its sizes; None for what is neither."""
    if text in NAMED:
        return NamedShape(text, NAMED[text])
    if not SIZES.fullmatch(text):
        return None
    shape = Shape.parse(text)
    if shape.rows == 0:
        raise InputError(f"the shape {shape} has no rows, so there is nothing to measure")
    return NamedShape(shape.slug, shape)


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
