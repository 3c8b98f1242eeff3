"""Both passes in C++: they give what those in Python give, and enter no Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.space import make_config, nearest_runnable
from tests.fake_driver import FakeDriver
from tests.torch_extension import entered, gradients
from tests.torch_on_host import STREAM, leaves
from tuner.launcher import engine as engines
from tuner.torch import direct, layer_norm_linear, ops
from tuner.torch import engine as engine_module

pytestmark = pytest.mark.usefixtures("seeded_torch")


def both(monkeypatch: pytest.MonkeyPatch, extension: Any, driver: FakeDriver, grad: Tensor, call: Any = layer_norm_linear,
         **options: Any) -> None:
    """The same results and gradients, bit for bit, and the same work on the same stream, both ways. The second call is C++."""
    found, work = [], []
    for module in (None, extension):
        monkeypatch.setattr(direct, "extension", module)
        for _ in range(2):
            driver.log.clear()
            arguments = leaves(**options)
            y = call(*arguments)
            with entered() as names:
                y.backward(grad)
        assert bool(names) is (module is None)
        found.append([y, *(None if tensor is None else tensor.grad for tensor in arguments)])
        work.append(list(driver.log))
    assert work[0] == work[1] != [] and set(driver.streams) == {STREAM}
    for one, other in zip(*found, strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            assert torch.equal(one, other) and one.dtype == other.dtype and other.is_contiguous()


@pytest.mark.parametrize("absent", ["", "weight", "bias", "linear_bias", "weight,bias,linear_bias"])
def test_absent_parameters(monkeypatch: pytest.MonkeyPatch, extension: Any, torch_driver: FakeDriver, absent: str) -> None:
    both(monkeypatch, extension, torch_driver, torch.randn(4, 9, 16), absent=absent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_data_types(monkeypatch: pytest.MonkeyPatch, extension: Any, torch_driver: FakeDriver, dtype: torch.dtype) -> None:
    both(monkeypatch, extension, torch_driver, torch.randn(4, 9, 16).to(dtype), dtype=dtype)


@pytest.mark.parametrize("grad", [torch.ones(()).expand(4, 9, 16), torch.randn(9, 16, 4).permute(2, 0, 1)])
def test_strides(monkeypatch: pytest.MonkeyPatch, extension: Any, torch_driver: FakeDriver, grad: Tensor) -> None:
    both(monkeypatch, extension, torch_driver, grad)


def test_l2_strided_inputs(monkeypatch: pytest.MonkeyPatch, extension: Any, torch_driver: FakeDriver) -> None:
    def call(x: Tensor, weight: Tensor, bias: Tensor, linear_weight: Tensor, linear_bias: Tensor) -> Tensor:
        x, linear_weight = (tensor.mT.contiguous().mT for tensor in (x, linear_weight))
        weight, bias = (torch.stack([tensor, tensor], 1)[:, 0] for tensor in (weight, bias))
        assert not any(tensor.is_contiguous() for tensor in (x, weight, bias, linear_weight))
        return layer_norm_linear(x, weight, bias, linear_weight, linear_bias)

    both(monkeypatch, extension, torch_driver, torch.randn(4, 9, 16), call)


def test_a_workspace(monkeypatch: pytest.MonkeyPatch, extension: Any, torch_driver: FakeDriver) -> None:
    monkeypatch.setattr(engines, "choose",
                        lambda problem, place: nearest_runnable(problem, make_config("gemm_mma"), place.limits))
    both(monkeypatch, extension, torch_driver, torch.randn(4, 9, 16))


@pytest.mark.parametrize(("data", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
                                            (torch.float32, torch.float16)])
def test_autocast(monkeypatch: pytest.MonkeyPatch, extension: Any, torch_driver: FakeDriver, data: torch.dtype,
                  cast: torch.dtype) -> None:
    def call(*given: Any) -> Tensor:
        with torch.autocast("cpu", cast):
            y: Tensor = layer_norm_linear(*given)
        assert y.dtype == cast
        return y

    both(monkeypatch, extension, torch_driver, torch.randn(4, 9, 16).to(cast), call, dtype=data, param_dtype=torch.float32)


@pytest.mark.parametrize(("dtype", "param_dtype", "cast"), [
    (torch.float32, torch.float32, None), (torch.bfloat16, torch.bfloat16, None), (torch.float64, torch.float64, None),
    (torch.float32, torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("absent", ["", "weight,bias,linear_bias"])
def test_the_operations(extension: Any, torch_driver: FakeDriver, dtype: torch.dtype, param_dtype: torch.dtype,
                        cast: torch.dtype | None, absent: str) -> None:
    """As graphs of torch.compile call them: the dispatcher goes to C++ once there is a kernel that is known."""
    gradients(leaves((2,), 3, 2), torch.randn(2, 2))
    given = [None if tensor is None else tensor.detach()
             for tensor in leaves(dtype=dtype, param_dtype=param_dtype, absent=absent)]
    with entered() as names, torch.autocast("cpu", torch.bfloat16):  # `cast` is what counts
        made = torch.ops.lnl.layer_norm_linear.default(*given, 1e-5, cast)
    right = ops.forward(*given, 1e-5, cast)  # type: ignore[arg-type]
    assert names == set() and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(made, right, strict=True))

    call, needs = torch.ops.lnl.layer_norm_linear_backward.default, [True, False, True, True, True]
    arguments = (torch.randn(4, 9, 16).to(made[0].dtype), *given[:4], *made[1:], 1e-5, cast, needs)
    first = call(*arguments)
    torch_driver.log.clear()
    with entered() as names:
        again = call(*arguments)
    assert len(again) == len(first) == (3 if absent else 4) and all(map(torch.equal, first, again))
    assert bool(torch_driver.log) is (names == set()) is (dtype != torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(extension: Any, torch_driver: FakeDriver, dtype: torch.dtype) -> None:
    gradients(leaves((2,), 3, 2), torch.randn(2, 2))  # from here on the dispatcher goes to C++
    given = leaves(dtype=dtype)
    torch.library.opcheck(torch.ops.lnl.layer_norm_linear.default, (*given, 1e-5, None))
    _, mean, rstd = ops.forward(*given, 1e-5, None)  # type: ignore[arg-type]
    plain = [None if tensor is None else tensor.detach() for tensor in (*given[:4], mean, rstd)]
    torch.library.opcheck(torch.ops.lnl.layer_norm_linear_backward.default,
                          (torch.randn(4, 9, 16).to(dtype), *plain, 1e-5, None, [True, False, True, True, False]))


def test_gradcheck(extension: Any, torch_driver: FakeDriver) -> None:
    gradients(leaves((2,), 3, 2), torch.randn(2, 2))
    call = torch.ops.lnl.layer_norm_linear.default
    assert torch.autograd.gradcheck(lambda *given: call(*given, 1e-5, None)[0], leaves((2, 3), 5, 4, torch.float64))


def changed_precision() -> None:
    torch.set_float32_matmul_precision("high")


def changed_determinism() -> None:
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("change", [changed_precision, changed_determinism, engine_module.forget])
def test_what_a_kernel_is_chosen_by_is_asked_in_each_call(extension: Any, torch_driver: FakeDriver,
                                                          change: Callable[[], None]) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    for _ in range(2):
        gradients(arguments, grad)
    try:
        change()
        for expected in (True, False):
            y = layer_norm_linear(*arguments)
            with entered() as names:
                y.backward(grad)
            assert ("problem_of" in names) is expected
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


BFLOAT16 = {"dtype": torch.bfloat16}


def result_of(options: dict[str, Any]) -> Tensor:
    """A call for leaves of these options; the one that `frozen` names needs no gradient. Under autocast where types differ."""
    options = dict(options)
    eps, frozen = options.pop("eps", 1e-5), options.pop("frozen", None)
    arguments = leaves(**options)
    if frozen is not None and (tensor := arguments[frozen]) is not None:
        tensor.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16) if "param_dtype" in options else nullcontext():
        return layer_norm_linear(*arguments, eps=eps)


@pytest.mark.parametrize(("before", "after"), [
    ({}, {"rows": (4, 8)}), ({}, {"hidden": 20}), ({}, {"out": 12}), ({}, {"eps": 1e-3}), ({}, {"frozen": 1}),
    (BFLOAT16, {"dtype": torch.float16}), (BFLOAT16, {**BFLOAT16, "param_dtype": torch.float32}),
    ({"frozen": 1}, {"absent": "weight"}), ({"frozen": 2}, {"absent": "bias"})], ids=str)
def test_other_calls_are_other_kernels(extension: Any, torch_driver: FakeDriver, before: dict[str, Any],
                                       after: dict[str, Any]) -> None:
    for options, known in ((before, False), (before, True), (after, False), (after, True), (before, True)):
        y = result_of(options)
        with entered() as names:
            y.sum().backward()
        assert ("problem_of" not in names) is known


def test_a_precision_set_for_cuda_alone_is_followed(way: bool, torch_driver: FakeDriver) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    gradients(arguments, grad)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with engine_module.watched() as asked:
            for _ in range(2):
                gradients(arguments, grad)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    assert [problem.accuracy for problem in asked] == ["tf32"]


def test_many_kinds_of_calls_do_not_pile_up(extension: Any, torch_driver: FakeDriver) -> None:
    kept = Counted()
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    for rows in range(1025):
        statistics = torch.randn(rows + 1, 1)
        extension.learn(torch.randn(4, 3), x, None, None, w, statistics, statistics, 1e-5, (True,) * 5, kept)
    assert sys.getrefcount(kept) < 10
    extension.forget()
    assert sys.getrefcount(kept) == 2


class Counted:
    handle = (0, 0, 0)


def test_a_gradient_of_another_type(way: bool, torch_driver: FakeDriver) -> None:
    given, grad = [tensor.detach() for tensor in leaves() if tensor is not None], torch.randn(4, 9, 16).to(torch.bfloat16)
    mean, rstd = given[0].mean(-1, keepdim=True), torch.ones(4, 9, 1)
    for _ in range(2):
        found, right = (engine_module.backward(dy, *given[:4], mean, rstd, 1e-5, (True,) * 5) for dy in (grad, grad.float()))
        assert found is not None and right is not None and all(map(torch.allclose, found, right))


def test_memory_that_is_not_there_is_pytorchs_error(extension: Any) -> None:
    x, w, statistics = torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 1)
    given = (torch.randn(2, 3), x, None, None, w, statistics, statistics, 1e-5, (False,) * 5)
    extension.learn(*given, SimpleNamespace(handle=(0, 0, 1 << 60)))
    with pytest.raises(RuntimeError, match="memory"):
        extension.backward(*given)


ONE = torch.ones(1, 1)


@pytest.mark.parametrize("arguments", [(), (0,) * 9, (*[ONE] * 7, 1e-5, ()), (*[ONE] * 7, "a", (True,) * 5),
                                       (*["tensor"] * 7, 1e-5, (True,) * 5), (None, *[ONE] * 6, 1e-5, (True,) * 5)])
def test_other_arguments_are_refused(extension: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        extension.backward(*arguments)


def test_no_replay_is_refused(extension: Any) -> None:
    with pytest.raises(AttributeError, match="handle"):
        extension.learn(*[ONE] * 7, 1e-5, (True,) * 5, None)
