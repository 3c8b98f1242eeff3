"""PyTorch's tensors on a GPU, what is right for them, and PyTorch's own way to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

from tests.torch_on_host import close, exact, leaves
from tuner.torch import engine, ops


def on_gpu(*rows: int, device: str = "cuda", **options: Any) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().to(device).requires_grad_(tensor.requires_grad)
            for tensor in leaves(rows, **options)]


def grads(arguments: list[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.grad for tensor in arguments]


def check(arguments: list[Tensor | None], found: list[Tensor | None], grad: Tensor, limit: float) -> None:
    assert all(close(got, value, limit) for got, value in zip(found, exact(arguments, grad), strict=True))


@contextmanager
def without_python() -> Iterator[None]:
    """Backward passes in the block may not come to what Python does for them."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((ops, "backward"), (ops, "backward_again"), (engine, "backward")):
            patch.setattr(module, name, None)
        yield


def torch_forward(*arguments: Any) -> Tensor:
    x, weight, bias, linear_weight, linear_bias = arguments
    functional = nn.functional
    result: Tensor = functional.linear(functional.layer_norm(x, x.shape[-1:], weight, bias), linear_weight, linear_bias)
    return result
