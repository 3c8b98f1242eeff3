"""Tensors that have no memory of their own, and those that go through tuner.backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree
from torch import Tensor

import tuner
from tests.fake_driver import FakeDriver
from tests.torch_on_host import LIMITS, STREAM, close, exact, leaves
from tuner.launcher import arrays
from tuner.launcher import engine as engines
from tuner.torch import layer_norm_linear

pytestmark = [pytest.mark.filterwarnings("error:PyTorch's own kernels"), pytest.mark.usefixtures("seeded_torch")]


class Wrapper(Tensor):
    """A tensor that has none of its own memory: it stands for another one, as distributed tensors do."""

    held: Tensor

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, requires_grad=held.requires_grad)
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.held if isinstance(value, Wrapper) else value

        return function(*torch.utils._pytree.tree_map(bare, given), **torch.utils._pytree.tree_map(bare, named or {}))


def test_a_subclass_as_gradient_is_left_to_pytorch(torch_driver: FakeDriver) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    found = torch.autograd.grad(layer_norm_linear(*arguments), arguments, Wrapper(grad))
    assert all(close(got, value, LIMITS[torch.float32]) for got, value in zip(found, exact(arguments, grad), strict=True))
    assert torch_driver.log == []


@pytest.mark.parametrize("which", [1, 2, 4])
def test_a_subclass_as_parameter_is_left_to_pytorch(torch_driver: FakeDriver, which: int) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    right = exact(arguments, grad)
    tensor = arguments[which]
    assert tensor is not None
    arguments[which] = Wrapper(tensor)
    layer_norm_linear(*arguments).backward(grad)
    assert torch_driver.log == [] and arguments[0] is not None and close(arguments[0].grad, right[0], LIMITS[torch.float32])


def test_transforms_of_torch_func_take_pytorchs_own_path(torch_driver: FakeDriver) -> None:
    given = [tensor.detach() for tensor in leaves() if tensor is not None]

    def loss(x: Tensor) -> Tensor:
        return layer_norm_linear(x, *given[1:]).square().sum()

    x = given[0].clone().requires_grad_()
    loss(x).backward()
    assert x.grad is not None and torch_driver.log
    enqueued = len(torch_driver.log)
    assert torch.allclose(torch.func.grad(loss)(given[0]), x.grad, rtol=1e-4, atol=1e-5)
    each = torch.func.vmap(torch.func.grad(loss))(given[0])
    assert torch.allclose(each, x.grad, rtol=1e-4, atol=1e-5)
    tangent = x.grad  # so that nothing cancels
    _, slope = torch.func.jvp(loss, (given[0],), (tangent,))
    assert torch.allclose(slope, x.grad.square().sum(), rtol=1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], tangent)
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent, slope, rtol=1e-4)
    assert len(torch_driver.log) == enqueued


def test_batches_of_incoming_gradients_are_left_to_pytorch(torch_driver: FakeDriver) -> None:
    arguments, grads = leaves(), torch.randn(3, 4, 9, 16)
    found = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grads, is_grads_batched=True)
    for index, grad in enumerate(grads):
        right = exact(arguments, grad)
        assert all(close(got[index], value, LIMITS[torch.float32]) for got, value in zip(found, right, strict=True))
    assert torch_driver.log == []


@pytest.fixture
def current(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CPU tensors go through tuner.backward as those on a GPU do; their current stream is the last of these."""
    streams = [STREAM]

    def refuse(tensor: Tensor, **options: Any) -> None:
        raise BufferError("Can't export tensors on a different CUDA device")  # as PyTorch's does off the current GPU

    monkeypatch.setattr(Tensor, "__dlpack__", refuse)
    monkeypatch.setattr(arrays, "_current_stream", lambda tensor: streams[-1])
    monkeypatch.setattr(arrays, "ON_CUDA", (1,))  # the number of the CPU in DLPack
    monkeypatch.setattr(engines, "_engines", {0: engines.engine(-1)})
    return streams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_go_through_tuner_backward(torch_driver: FakeDriver, current: list[int], dtype: torch.dtype) -> None:
    arguments, dy = leaves(dtype=dtype), torch.randn(4, 9, 16).to(dtype)
    results: Any = tuner.backward(dy, *arguments[:4])  # type: ignore[arg-type]
    assert results.dx.shape == (4, 9, 24) and set(torch_driver.streams) == {STREAM}
    found = [results.dx, results.dgamma, results.dbeta, results.dw, results.db]
    assert all(close(got, value, LIMITS[dtype]) for got, value in zip(found, exact(arguments, dy), strict=True))
    expanded = torch.ones(()).to(dtype).expand(4, 9, 16)
    with pytest.raises(tuner.InputError, match="dy must be C-contiguous"):
        tuner.backward(expanded, *arguments[:4])  # type: ignore[arg-type]


@pytest.mark.parametrize(("now", "said"), [
    (STREAM, []), (3, ["record 3", f"wait {STREAM}"]), (0, ["record 1", f"wait {STREAM}"])])
def test_a_stream_waits_for_pytorchs_current_one_once(
        torch_driver: FakeDriver, current: list[int], now: int, said: list[str]) -> None:
    current.append(now)
    tuner.backward(torch.randn(4, 9, 16), *leaves()[:4], stream=STREAM)  # type: ignore[arg-type]
    assert [entry for entry in torch_driver.log if entry.startswith(("record", "wait"))] == said


def test_tensors_without_memory_are_refused(torch_driver: FakeDriver, current: list[int]) -> None:
    x, *others = leaves()[:4]
    assert x is not None
    for odd in (Wrapper(x), x.detach().to_sparse()):
        with pytest.raises(tuner.TunerError, match="x is a tensor without memory of its own"):
            tuner.backward(torch.randn(4, 9, 16), odd, *others)  # type: ignore[arg-type]


def test_autograd_sees_that_results_are_written(torch_driver: FakeDriver, current: list[int]) -> None:
    dw, factor = torch.zeros(16, 24), torch.ones(16, 24, requires_grad=True)
    product = factor * dw
    tuner.backward(torch.randn(4, 9, 16), *leaves()[:4], out={"dw": dw})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
