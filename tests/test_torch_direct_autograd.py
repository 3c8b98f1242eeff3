"""What autograd asks of the two passes, in Python and in C++."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils._pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fake_driver import FakeDriver
from tests.test_torch_tensors import Wrapper
from tests.torch_extension import gradients
from tests.torch_on_host import LIMITS, changed_in_place_raises, close, exact, leaves
from tuner.errors import LaunchError
from tuner.torch import engine as engine_module
from tuner.torch import layer_norm_linear

pytestmark = pytest.mark.usefixtures("seeded_torch")


@pytest.mark.parametrize("second", [False, True])
def test_t3_a_second_derivative_raises(way: bool, torch_driver: FakeDriver, second: bool) -> None:
    arguments = leaves((3,), 4, 2)
    if second:  # when the kernel is known
        layer_norm_linear(*arguments).sum().backward()
    (first,) = torch.autograd.grad(layer_norm_linear(*arguments).square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def test_retained_graphs_go_backward_again_and_others_do_not(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    y = layer_norm_linear(*arguments)
    once, twice = (torch.autograd.grad(y, arguments, grad, retain_graph=retain) for retain in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, arguments, grad)


@pytest.mark.parametrize("which", range(4))
def test_saved_tensors_changed_in_place_raise(way: bool, torch_driver: FakeDriver, which: int) -> None:
    changed_in_place_raises(which)


def test_y_may_be_changed_in_place(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    for _ in range(2):
        for tensor in arguments:
            assert tensor is not None
            tensor.grad = None
        layer_norm_linear(*arguments).relu_().backward(grad)
    y = layer_norm_linear(*arguments)
    right = exact(arguments, grad * (y > 0))
    assert all(tensor is not None and close(tensor.grad, value, LIMITS[torch.float32])
               for tensor, value in zip(arguments, right, strict=True))


def test_without_gradients_nothing_is_kept(way: bool, torch_driver: FakeDriver) -> None:
    arguments = leaves()
    with torch.no_grad():
        y = layer_norm_linear(*arguments)
    assert y.grad_fn is None and not y.requires_grad
    given = [tensor.detach() for tensor in arguments if tensor is not None]
    assert layer_norm_linear(*given).grad_fn is None
    with torch.inference_mode():
        assert torch.equal(layer_norm_linear(*given), y)


def test_hooks_on_what_is_saved_are_called(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    packed: list[Tensor] = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or len(packed) - 1,  # type: ignore[func-returns-value]
                                                      lambda place: packed[place]):
            y = layer_norm_linear(*arguments)
        y.backward(grad)
    assert len(packed) == 12
    right = exact(arguments, 2 * grad)
    assert all(tensor is not None and close(tensor.grad, value, LIMITS[torch.float32])
               for tensor, value in zip(arguments, right, strict=True))


def test_negated_views_are_read_as_what_they_say(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    for _ in range(2):
        found = torch.autograd.grad(layer_norm_linear(*arguments), arguments, torch._neg_view(grad))
    assert all(close(got, value, LIMITS[torch.float32]) for got, value in zip(found, exact(arguments, -grad), strict=True))


def test_transforms_are_left_to_pytorch_where_the_kernel_is_known(way: bool, torch_driver: FakeDriver) -> None:
    given = [tensor.detach() for tensor in leaves() if tensor is not None]

    def loss(x: Tensor) -> Tensor:
        return layer_norm_linear(x, *given[1:]).square().sum()

    for _ in range(2):
        x = given[0].clone().requires_grad_()
        loss(x).backward()
    assert x.grad is not None
    torch_driver.log.clear()
    for found in (torch.func.grad(loss)(given[0]), torch.func.vmap(torch.func.grad(loss))(given[0])):
        assert torch.allclose(found, x.grad, rtol=1e-4, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], x.grad)
        slope = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    assert slope is not None and torch.allclose(slope, x.grad.square().sum(), rtol=1e-4)
    assert torch_driver.log == []


class Marked(Tensor):
    """A tensor that has memory of its own, but may mean something else by it."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.as_subclass(Tensor) if isinstance(value, Marked) else value

        with torch._C._DisableTorchDispatch():
            return function(*torch.utils._pytree.tree_map(bare, given), **torch.utils._pytree.tree_map(bare, named or {}))


@pytest.mark.parametrize("wrap", [Wrapper, lambda grad: grad.as_subclass(Marked)], ids=["wrapper", "marked"])
def test_a_subclass_as_gradient_is_left_to_pytorch(way: bool, torch_driver: FakeDriver, wrap: Callable[[Tensor], Tensor]) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    gradients(leaves(), grad)
    torch_driver.log.clear()
    found = torch.autograd.grad(layer_norm_linear(*arguments), arguments, wrap(grad))
    assert all(close(got, value, LIMITS[torch.float32]) for got, value in zip(found, exact(arguments, grad), strict=True))
    assert torch_driver.log == []


def test_types_no_kernel_knows_are_pytorchs_own(way: bool, torch_driver: FakeDriver) -> None:
    assert torch.autograd.gradgradcheck(layer_norm_linear, leaves((2,), 3, 2, torch.float64))
    assert torch_driver.log == []


def test_many_threads_at_once(way: bool, torch_driver: FakeDriver) -> None:
    def work(seed: int) -> bool:
        arguments, grad = leaves(seed=seed), torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(seed))
        if seed % 4 == 3:
            engine_module.forget()
        found, right = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad), exact(arguments, grad)
        return all(close(got, value, LIMITS[torch.float32]) for got, value in zip(found, right, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


def test_checkpointed_layers_agree(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    for reentrant in (True, False):
        y: Tensor = checkpoint(layer_norm_linear, *arguments, use_reentrant=reentrant)
        found = [tensor.grad for tensor in leaves() if tensor is not None]
        for tensor in arguments:
            assert tensor is not None
            tensor.grad = None
        y.backward(grad)
        found = [tensor.grad for tensor in arguments if tensor is not None]
        assert all(close(got, value, LIMITS[torch.float32]) for got, value in zip(found, exact(arguments, grad), strict=True))


def test_autocast_where_no_kernel_serves(way: bool, torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "backward", lambda *arguments: None)
    arguments, grad = leaves(), torch.randn(4, 9, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer_norm_linear(*arguments)
    y.backward(grad)
    assert all(tensor is not None and close(tensor.grad, value, 2 * LIMITS[torch.bfloat16])
               for tensor, value in zip(arguments, exact(arguments, grad), strict=True))
    assert torch_driver.log == []


def test_masks(way: bool, torch_driver: FakeDriver) -> None:
    arguments = leaves()
    for tensor, needed in zip(arguments, (True, False, True, False, True), strict=True):
        assert tensor is not None
        tensor.requires_grad_(needed)
    for _ in range(2):
        assert [tensor is not None for tensor in gradients(arguments, torch.randn(4, 9, 16))] == [True, False, True, False, True]


def test_what_has_no_memory_is_left_to_pytorch(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grads = leaves(), torch.randn(3, 4, 9, 16)
    found = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grads, is_grads_batched=True)
    assert torch_driver.log == []
    for place, grad in enumerate(grads):
        right = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad)
        assert all(torch.allclose(a[place], b, atol=1e-4) for a, b in zip(found, right, strict=True))


def test_what_the_driver_refuses_is_a_sentence(way: bool, torch_driver: FakeDriver) -> None:
    gradients(leaves(), torch.randn(4, 9, 16))
    torch_driver.fail = "cuLaunchKernel"
    with pytest.raises(LaunchError, match="the GPU refused the work: an illegal memory access"):
        gradients(leaves(), torch.randn(4, 9, 16))
