"""The tuned kernels under PyTorch without a GPU: CPU tensors, a driver whose kernels run on the host executor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from codegen.space import make_config, nearest_runnable
from tests.fake_driver import FakeDriver
from tuner.executors.host import HostExecutor
from tuner.launcher import engine as engines
from tuner.launcher.driver import Device, Driver
from tuner.launcher.engine import Engine
from tuner.launcher.program import Launcher
from tuner.store import Store
from tuner.torch import direct, layer_norm_linear
from tuner.torch import engine as engine_module
from tuner.torch.engine import NAMES

torch.set_num_threads(1)  # tests run in several processes at once, and their tensors are small

STREAM = 7


def install(monkeypatch: pytest.MonkeyPatch, host: HostExecutor, store: Store) -> FakeDriver:
    """From now on CPU tensors are served as those on a GPU are, by the variant that compiles fastest."""
    fake = FakeDriver(host)
    driver = Driver(fake)
    engine = Engine(Device(driver, 0), Launcher(driver, store), fake.compiled)
    monkeypatch.setattr(engine_module, "serves", lambda x: x.dtype in NAMES)
    monkeypatch.setattr(engines, "_engines", {-1: engine})  # the number that CPU tensors give
    engine_module.forget()
    monkeypatch.setattr(engine_module, "stream_of", lambda index: STREAM)
    monkeypatch.setattr(direct, "start", lambda: None)  # it takes the time of many tests
    monkeypatch.setattr(engines, "choose",
                        lambda problem, place: nearest_runnable(problem, make_config("row_thread"), place.limits))
    return fake


def leaves(rows: tuple[int, ...] = (4, 9), hidden: int = 24, out: int = 16, dtype: torch.dtype = torch.float32,
           param_dtype: torch.dtype | None = None, absent: str = "", seed: int = 0) -> list[Tensor | None]:
    """x, weight, bias, linear_weight and linear_bias, each a leaf that needs its gradient; those named `absent` are None."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(kind).requires_grad_()

    kind = dtype if param_dtype is None else param_dtype
    made: list[Tensor | None] = [leaf(dtype, *rows, hidden), leaf(kind, hidden), leaf(kind, hidden), leaf(kind, out, hidden),
                                 leaf(kind, out)]
    names = ("x", "weight", "bias", "linear_weight", "linear_bias")
    return [None if name in absent.split(",") else tensor for name, tensor in zip(names, made, strict=True)]


def exact(arguments: list[Tensor | None], grad: Tensor, eps: float = 1e-5) -> list[Tensor | None]:
    """The gradients in float64 by autograd, None for what is None or needs none."""
    wide = [None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in arguments]
    x, weight, bias, linear_weight, linear_bias = wide
    assert x is not None and linear_weight is not None
    functional = torch.nn.functional
    y = functional.linear(functional.layer_norm(x, x.shape[-1:], weight, bias, eps), linear_weight, linear_bias)
    needed = [tensor for tensor in wide if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(y, needed, grad.double()) if needed else ())
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in wide]


LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
"""The accuracy class of each data type; float64 is PyTorch's own."""


def error_of(got: Tensor | None, right: Tensor | None) -> float:
    """The relative Frobenius error; 0 where neither is there, infinite where one is, or they are of two shapes."""
    if got is None or right is None:
        return 0.0 if got is right else math.inf
    return (got.double() - right).norm().item() / max(right.norm().item(), 1e-30) if got.shape == right.shape else math.inf


def close(got: Tensor | None, right: Tensor | None, limit: float) -> bool:
    """Whether both are there, of one shape, and the relative Frobenius error is within the limit; or neither is there."""
    return error_of(got, right) <= limit


def changed_in_place_raises(which: int) -> None:
    """The backward pass says that an argument, by its place, is no longer what it was in the forward pass."""
    arguments = leaves()
    y, tensor = layer_norm_linear(*arguments), arguments[which]
    assert tensor is not None
    with torch.no_grad():
        tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
