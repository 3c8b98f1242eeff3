"""layer_norm_linear under PyTorch: the gradients, what autograd asks of them, and what the dispatcher does.

`served` runs each test on PyTorch's own kernels behind the operation and on the tuned ones, on a stand-in for a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fake_driver import FakeDriver
from tests.torch_on_host import LIMITS, STREAM, changed_in_place_raises, close, exact, leaves
from tuner.errors import LaunchError
from tuner.launcher import engine as engines
from tuner.torch import LayerNormLinear, layer_norm_linear
from tuner.torch import engine as engine_module
from tuner.torch.function import _Eager
from tuner.wisdom.recall import choose

pytestmark = [pytest.mark.filterwarnings("error:PyTorch's own kernels"), pytest.mark.usefixtures("seeded_torch")]

NEEDS = list(itertools.product((True, False), repeat=5))
FEW = [needs for needs in NEEDS if sum(needs) in (0, 1, 5) or needs == (True, False, True, True, False)]
"""Each needs a kernel of its own, which has to be compiled."""


@pytest.fixture(params=["plain", "tuned"])
def served(request: pytest.FixtureRequest, torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels do the backward pass behind the operation."""
    if request.param == "plain":
        monkeypatch.setattr(engine_module, "backward", lambda *arguments: None)
    kind: str = request.param
    return kind


def gradients(arguments: list[Tensor | None], grad: Tensor, call: Callable[..., Tensor] = layer_norm_linear) -> list[Any]:
    """Of each argument that is there and needs one."""
    y = call(*arguments)
    if y.requires_grad:
        y.backward(grad)
    return [None if tensor is None else tensor.grad for tensor in arguments]


def check(arguments: list[Tensor | None], grad: Tensor, limit: float, **options: Any) -> None:
    found, right = gradients(arguments, grad, **options), exact(arguments, grad)
    assert all(close(got, value, limit) for got, value in zip(found, right, strict=True))


def test_t1_the_incoming_gradient_is_used(served: str) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    check(arguments, grad, LIMITS[torch.float32])
    once = [tensor.grad.clone() for tensor in arguments if tensor is not None and tensor.grad is not None]
    again = [tensor.grad for tensor in leaves() if tensor is not None]
    assert again == [None] * 5
    twice = gradients(leaves(), 2 * grad)
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "".join("01"[need] for need in needs))
def test_t2_every_mask(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, needs: tuple[bool, ...]) -> None:
    if needs not in FEW:
        monkeypatch.setattr(engine_module, "backward", lambda *arguments: None)
    arguments = leaves((5,), 8, 6)
    for tensor, need in zip(arguments, needs, strict=True):
        assert tensor is not None
        tensor.requires_grad_(need)
    check(arguments, torch.randn(5, 6), LIMITS[torch.float32])
    if not any(needs):
        assert torch_driver.log == []


def test_t2_what_is_not_needed_is_not_computed(torch_driver: FakeDriver) -> None:
    arguments = leaves((40,), 8, 6)
    for tensor in arguments[:4]:
        assert tensor is not None
        tensor.requires_grad_(False)
    with engine_module.watched() as asked:
        check(arguments, torch.randn(40, 6), LIMITS[torch.float32])
    assert [problem.wants for problem in asked] == [frozenset({"db"})]


@pytest.mark.parametrize("absent", ["weight", "bias", "linear_bias", "weight,bias", "weight,bias,linear_bias"])
def test_t2_absent_parameters(served: str, absent: str) -> None:
    check(leaves(absent=absent), torch.randn(4, 9, 16), LIMITS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_data(served: str, dtype: torch.dtype) -> None:
    arguments, grad = leaves(dtype=dtype), torch.randn(4, 9, 16).to(dtype)
    check(arguments, grad, LIMITS[dtype] * (3 if served == "plain" else 1))  # PyTorch rounds between its kernels as well
    assert all(tensor is not None and tensor.grad is not None and tensor.grad.dtype == dtype for tensor in arguments)


@pytest.mark.parametrize(("data", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
                                            (torch.float32, torch.float16), (torch.float16, torch.float16)])
def test_autocast_keeps_float32_parameters(served: str, data: torch.dtype, cast: torch.dtype) -> None:
    arguments, grad = leaves(dtype=data, param_dtype=torch.float32), torch.randn(4, 9, 16).to(cast)

    def call(*given: Any) -> Tensor:
        with torch.autocast("cpu", cast):
            y = layer_norm_linear(*given)
        assert y.dtype == cast
        return y

    check(arguments, grad, 2 * LIMITS[cast], call=call)  # y and w are both rounded
    assert all(tensor is not None and tensor.grad is not None and tensor.grad.dtype == tensor.dtype for tensor in arguments)


def test_t3_a_second_derivative_raises(served: str) -> None:
    arguments = leaves((3,), 4, 2)
    (first,) = torch.autograd.grad(layer_norm_linear(*arguments).square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def test_t3_a_second_derivative_of_the_operation_raises(served: str) -> None:
    arguments = leaves((3,), 4, 2)
    y, _, _ = torch.ops.lnl.layer_norm_linear(*arguments, 1e-5, None)
    (first,) = torch.autograd.grad(y.square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def expanded() -> Tensor:
    return torch.ones(()).expand(4, 9, 16)


def over_the_rows() -> Tensor:
    return torch.randn(4, 1, 16).expand(4, 9, 16)


def transposed() -> Tensor:
    return torch.randn(9, 16, 4).permute(2, 0, 1)


@pytest.mark.parametrize("make", [expanded, over_the_rows, transposed])
def test_l1_gradients_of_any_strides(served: str, make: Callable[[], Tensor]) -> None:
    torch.manual_seed(1)
    grad = make()
    check(leaves(), grad, LIMITS[torch.float32])
    assert all(torch.equal(a, b) for a, b in zip(gradients(leaves(), grad), gradients(leaves(), grad.contiguous()), strict=True))


def test_l1_a_sum(served: str) -> None:
    arguments = leaves()
    layer_norm_linear(*arguments).sum().backward()
    right = exact(arguments, torch.ones(4, 9, 16))
    assert all(tensor is not None and close(tensor.grad, value, LIMITS[torch.float32])
               for tensor, value in zip(arguments, right, strict=True))


@pytest.mark.parametrize("which", [0, 3])
def test_l2_strided_inputs(served: str, which: int) -> None:
    arguments = leaves()
    tensor = arguments[which]
    assert tensor is not None
    arguments[which] = tensor.detach().mT.contiguous().mT.requires_grad_()
    check(arguments, torch.randn(4, 9, 16), LIMITS[torch.float32])


@pytest.mark.parametrize("rows", [(0,), (3, 0), (1,), (), (2, 3, 4)], ids=str)
def test_any_leading_dimensions(served: str, rows: tuple[int, ...]) -> None:
    check(leaves(rows), torch.randn(*rows, 16), LIMITS[torch.float32])


def test_retained_graphs_go_backward_again(served: str) -> None:
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    y = layer_norm_linear(*arguments)
    once, twice = (torch.autograd.grad(y, arguments, grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("which", range(4))
def test_saved_tensors_changed_in_place_raise(served: str, which: int) -> None:
    changed_in_place_raises(which)


def test_a_bias_may_change_as_nothing_reads_it(served: str) -> None:
    arguments = leaves()
    y = layer_norm_linear(*arguments)
    assert arguments[4] is not None
    with torch.no_grad():
        arguments[4].mul_(2)
    y.sum().backward()


def test_t7_backward_on_threads_of_its_own(served: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(seed: int) -> bool:
        arguments, grad = leaves(seed=seed), torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(seed))
        found, right = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad), exact(arguments, grad)
        return all(close(got, value, LIMITS[torch.float32]) for got, value in zip(found, right, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))


def test_launches_go_to_the_current_stream(torch_driver: FakeDriver) -> None:
    gradients(leaves(), torch.randn(4, 9, 16))
    assert torch_driver.log and set(torch_driver.streams) == {STREAM}


def test_saved_statistics_are_handed_to_the_kernel(torch_driver: FakeDriver) -> None:
    from codegen.params import struct

    gradients(leaves(), torch.randn(4, 9, 16))
    for params in torch_driver.params:
        *_, mean, rstd = struct.unpack("<12Q", params[:96])
        assert mean != 0 and rstd != 0


def test_a_program_is_compiled_once_and_says_so(torch_driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tuner")
    for rows in (36, 36, 35, 20):
        gradients(leaves((rows,)), torch.randn(rows, 16))
    assert len(torch_driver._loaded) == 1
    assert [record.getMessage().partition(" of")[0] for record in caplog.records] == ["compiling kernel 1"]


def test_what_is_chosen_without_wisdom_is_right(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "choose", choose)
    check(leaves(), torch.randn(4, 9, 16), LIMITS[torch.float32])


def test_types_no_kernel_knows_are_pytorchs_own(torch_driver: FakeDriver) -> None:
    arguments = leaves((5,), dtype=torch.float64)
    check(arguments, torch.randn(5, 16, dtype=torch.float64), LIMITS[torch.float64])
    assert torch_driver.log == []


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_mixes_of_types_no_kernel_knows_are_pytorchs_own(torch_driver: FakeDriver, odd: int) -> None:
    given = [tensor.detach() for tensor in leaves(dtype=torch.bfloat16) if tensor is not None]
    sizes = (0, 24, 16, torch.bfloat16, torch.bfloat16)
    types = [torch.float32 if place == odd else torch.bfloat16 for place in range(3)]  # of the gradient, weight and bias
    assert engine_module.problem_of((*sizes, *types, (True,) * 5, False, "highest", 36, 1e-5)) is None
    grad, weight, bias = (tensor.to(kind) for tensor, kind in zip((torch.randn(4, 9, 16), *given[1:3]), types, strict=True))
    statistics = torch.randn(4, 9, 1), torch.rand(4, 9, 1) + 0.5
    assert engine_module.backward(grad, given[0], weight, bias, given[3], *statistics, 1e-5, (True,) * 5) is None
    assert torch_driver.log == []


def test_where_nothing_compiles_pytorchs_own_kernels_serve(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.errors import ToolchainError

    def none(source: Any) -> bytes:
        raise ToolchainError("no nvcc was found")

    monkeypatch.setattr(engines.engine(-1), "_compiled", none)
    with pytest.warns(UserWarning, match=r"PyTorch's own kernels .* \(no nvcc was found\)"):
        check(leaves(), torch.randn(4, 9, 16), LIMITS[torch.float32])


@pytest.mark.filterwarnings("default:PyTorch's own kernels")
def test_where_nothing_loads_pytorchs_own_kernels_serve(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_driver.fail = "cuModuleLoadData"
    with pytest.warns(UserWarning, match=r"PyTorch's own kernels .*cuModuleLoadData failed"):
        check(leaves(), torch.randn(4, 9, 16), LIMITS[torch.float32])
    assert torch_driver.log == []
    engine_module.forget()
    monkeypatch.setattr(engine_module, "_may_load", lambda: False)
    with pytest.raises(LaunchError, match="while a CUDA graph is captured"):
        gradients(leaves(), torch.randn(4, 9, 16))


def test_tf32_is_taken_where_pytorch_may_take_it(torch_driver: FakeDriver) -> None:
    sizes = (0, 24, 16, torch.float32, torch.float32, torch.float32, torch.float32, None, (True,) * 5, False)
    problems = [engine_module.problem_of((*sizes, name, 36, 1e-5)) for name in ("highest", "high", "medium")]
    assert [problem.accuracy for problem in problems if problem is not None] == ["fp32", "tf32", "bf16"]



def test_a_precision_set_for_cuda_alone_is_followed(torch_driver: FakeDriver) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with engine_module.watched() as asked:
            gradients(leaves(), torch.randn(4, 9, 16))
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    assert [problem.accuracy for problem in asked] == ["tf32"]


def test_deterministic_algorithms_are_asked_for(torch_driver: FakeDriver) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with engine_module.watched() as asked:
            gradients(leaves(), torch.randn(4, 9, 16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [problem.deterministic for problem in asked] == [True]


def test_cpu_tensors_take_pytorchs_own_path() -> None:
    y = layer_norm_linear(*leaves())
    assert type(y.grad_fn).__name__ == "AddmmBackward0" or "Linear" in type(y.grad_fn).__name__ or "View" in type(
        y.grad_fn).__name__
    assert torch.autograd.gradgradcheck(layer_norm_linear, [tensor.detach().double().requires_grad_() for tensor in leaves(
        (2,), 3, 2) if tensor is not None])


@pytest.mark.parametrize("call", [
    lambda *given: torch.ops.lnl.layer_norm_linear(*given, 1e-5, None)[0], lambda *given: _Eager.apply(*given, 1e-5, None)],
    ids=["operation", "eager"])
def test_gradcheck(call: Callable[..., Tensor]) -> None:
    given = [tensor.detach().double().requires_grad_() for tensor in leaves((2, 3), 5, 4) if tensor is not None]
    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(served: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(torch.ops.lnl.layer_norm_linear.default, (*leaves(dtype=dtype), 1e-5, None))


@pytest.mark.parametrize("needs", [(True,) * 5, (True, False, True, False, False)], ids=str)
def test_opcheck_of_the_backward_operation(served: str, needs: tuple[bool, ...]) -> None:
    given = [None if tensor is None else tensor.detach() for tensor in leaves()]
    torch.library.opcheck(torch.ops.lnl.layer_norm_linear_backward.default,
                          (torch.randn(4, 9, 16), *given[:4], torch.randn(4, 9, 1), torch.rand(4, 9, 1) + 0.5, 1e-5, None,
                           list(needs)))


def test_a_module_learns_as_pytorchs_own_do(served: str) -> None:
    torch.manual_seed(0)
    ours = LayerNormLinear(24, 16)
    theirs = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.Linear(24, 16))
    theirs.load_state_dict({key.replace("norm", "0").replace("linear", "1"): value for key, value in ours.state_dict().items()})
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(1)
        curve = []
        for _ in range(5):
            x, target = torch.randn(32, 24), torch.randn(32, 16)
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        losses.append(curve)
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5)
