"""What tests of the extension in C++ have in common; its fixtures are in conftest.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tuner.torch import direct, layer_norm_linear

TORCH = str(Path(direct.__file__).parent)


@contextmanager
def entered() -> Iterator[set[str]]:
    """The functions of tuner.torch in Python that run in the block, in this thread; the backward pass of CPU tensors does."""
    names: set[str] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(TORCH):
            names.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def gradients(arguments: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    layer_norm_linear(*arguments).backward(grad)
    return [None if tensor is None else tensor.grad for tensor in arguments]
