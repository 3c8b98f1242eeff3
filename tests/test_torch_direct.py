"""The compiled call of the launcher from PyTorch's tensors: it gives what the one in Python gives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.space import make_config, nearest_runnable
from tests.fake_driver import FakeDriver
from tests.torch_on_host import STREAM, leaves
from tuner.errors import LaunchError, ToolchainError
from tuner.executors.host_toolchain import find_compiler
from tuner.launcher import engine as engines
from tuner.store import Store
from tuner.torch import direct, layer_norm_linear
from tuner.torch import engine as engine_module

pytestmark = pytest.mark.usefixtures("seeded_torch")


@pytest.fixture(scope="module")
def compiled(store: Store) -> Any:
    return direct.build(store, find_compiler())


@pytest.fixture(params=[False, True], ids=["python", "compiled"])
def way(request: pytest.FixtureRequest, compiled: Any, torch_driver: FakeDriver,
        monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the compiled call serves. That it does so is looked at behind each test, and that it did not fall back."""
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return compiled(*arguments)

    monkeypatch.setattr(direct, "compiled", counted if request.param else None)
    yield request.param
    assert bool(calls) is request.param


def gradients(arguments: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    layer_norm_linear(*arguments).backward(grad)
    return [None if tensor is None else tensor.grad for tensor in arguments]


def both(monkeypatch: pytest.MonkeyPatch, compiled: Any, driver: FakeDriver, grad: Tensor, **options: Any) -> None:
    """The same gradients, bit for bit, and the same work on the same stream, both ways."""
    found, work = [], []
    for function in (None, compiled):
        monkeypatch.setattr(direct, "compiled", function)
        driver.log.clear()
        found.append(gradients(leaves(**options), grad))
        work.append(list(driver.log))
    assert work[0] == work[1] != [] and set(driver.streams) == {STREAM}
    for one, other in zip(*found, strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            assert torch.equal(one, other) and one.dtype == other.dtype and other.is_contiguous()


@pytest.mark.parametrize("absent", ["", "weight", "bias", "linear_bias", "weight,bias,linear_bias"])
def test_absent_parameters(monkeypatch: pytest.MonkeyPatch, compiled: Any, torch_driver: FakeDriver, absent: str) -> None:
    both(monkeypatch, compiled, torch_driver, torch.randn(4, 9, 16), absent=absent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_data_types(monkeypatch: pytest.MonkeyPatch, compiled: Any, torch_driver: FakeDriver, dtype: torch.dtype) -> None:
    both(monkeypatch, compiled, torch_driver, torch.randn(4, 9, 16).to(dtype), dtype=dtype)


@pytest.mark.parametrize("grad", [torch.ones(()).expand(4, 9, 16), torch.randn(9, 16, 4).permute(2, 0, 1)])
def test_strides(monkeypatch: pytest.MonkeyPatch, compiled: Any, torch_driver: FakeDriver, grad: Tensor) -> None:
    both(monkeypatch, compiled, torch_driver, grad)


def test_a_workspace(monkeypatch: pytest.MonkeyPatch, compiled: Any, torch_driver: FakeDriver) -> None:
    monkeypatch.setattr(engines, "choose",
                        lambda problem, place: nearest_runnable(problem, make_config("gemm_mma"), place.limits))
    both(monkeypatch, compiled, torch_driver, torch.randn(4, 9, 16))


def test_a_gradient_of_another_type(way: bool, torch_driver: FakeDriver) -> None:
    given, grad = [tensor.detach() for tensor in leaves() if tensor is not None], torch.randn(4, 9, 16).to(torch.bfloat16)
    mean, rstd = given[0].mean(-1, keepdim=True), torch.ones(4, 9, 1)
    found, right = (engine_module.backward(dy, *given[:4], mean, rstd, 1e-5, (True,) * 5) for dy in (grad, grad.float()))
    assert found is not None and right is not None and all(map(torch.allclose, found, right))


def test_masks(way: bool, torch_driver: FakeDriver) -> None:
    arguments = leaves()
    for tensor, needed in zip(arguments, (True, False, True, False, True), strict=True):
        assert tensor is not None
        tensor.requires_grad_(needed)
    assert [tensor is not None for tensor in gradients(arguments, torch.randn(4, 9, 16))] == [True, False, True, False, True]


def test_what_has_no_memory_is_left_to_pytorch(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grads = leaves(), torch.randn(3, 4, 9, 16)
    found = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grads, is_grads_batched=True)
    assert torch_driver.log == []
    for place, grad in enumerate(grads):
        right = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad)
        assert all(torch.allclose(a[place], b, atol=1e-4) for a, b in zip(found, right, strict=True))


def test_what_the_driver_refuses_is_a_sentence(way: bool, torch_driver: FakeDriver) -> None:
    torch_driver.fail = "cuLaunchKernel"
    with pytest.raises(LaunchError, match="the GPU refused the work: an illegal memory access"):
        gradients(leaves(), torch.randn(4, 9, 16))


def test_memory_that_is_not_there_is_pytorchs_error(compiled: Any) -> None:
    x, w, statistics = torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 1)
    with pytest.raises(RuntimeError, match="memory"):
        compiled(0, 0, 1 << 60, 0, torch.randn(2, 3), x, None, None, w, statistics, statistics, (False,) * 5)


@pytest.mark.parametrize("arguments", [(), (0,) * 12, (0, 0, 0, 0, *[torch.ones(1)] * 7, ()), ("a",) * 11 + ((True,) * 5,),
                                       (0, 0, 0, 0, *["tensor"] * 7, (True,) * 5)])
def test_other_arguments_are_refused(compiled: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        compiled(*arguments)


def test_where_it_cannot_be_compiled_python_serves(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    def none() -> None:
        raise ToolchainError("there is no C++ compiler")

    caplog.set_level(logging.INFO, "tuner")
    monkeypatch.setattr(direct, "find_compiler", none)
    monkeypatch.setattr(direct, "compiled", None)
    direct._make()
    assert direct.compiled is None and "there is no C++ compiler" in caplog.text
    assert all(tensor is not None for tensor in gradients(leaves(), torch.randn(4, 9, 16)))


def test_it_is_made_once_and_beside_the_calls(monkeypatch: pytest.MonkeyPatch, compiled: Any) -> None:
    built = []

    def build(store: Store, compiler: Any) -> Any:
        built.append(store.root)
        return compiled

    for name, value in (("build", build), ("compiled", None), ("_thread", None)):
        monkeypatch.setattr(direct, name, value)
    threads = {direct.start() for _ in range(3)}
    assert len(threads) == 1
    threads.pop().join()
    assert direct.compiled is compiled and len(built) == 1 and isinstance(built[0], Path)


def test_without_a_lock_what_is_compiled_serves(store: Store, monkeypatch: pytest.MonkeyPatch, compiled: Any,
                                                tmp_path: Path) -> None:
    """A store that cannot be written has no lock, but may have the library."""
    monkeypatch.setattr(direct, "_LOCK", str(tmp_path))  # a folder
    monkeypatch.setattr(direct, "compiled", None)
    monkeypatch.setattr(direct, "Store", lambda: store)
    direct._make()
    assert direct.compiled is not None
