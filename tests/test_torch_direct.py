"""Both passes in C++: they give what those in Python give, and enter no Python."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from codegen.space import make_config, nearest_runnable
from tests.fake_driver import FakeDriver
from tests.test_torch_tensors import Wrapper
from tests.test_workers import running, wait_until
from tests.torch_on_host import LIMITS, STREAM, close, exact, leaves
from tuner.errors import LaunchError, ToolchainError
from tuner.executors.host_toolchain import find_compiler
from tuner.launcher import engine as engines
from tuner.store import Store
from tuner.torch import direct, layer_norm_linear, ops
from tuner.torch import engine as engine_module

pytestmark = pytest.mark.usefixtures("seeded_torch")


ROOT = Path(__file__).resolve().parent.parent
TORCH = str(Path(direct.__file__).parent)


@pytest.fixture(scope="module")
def built(store: Store) -> Any:
    module: Any = direct.build(store, find_compiler())
    module.stand_in(STREAM)
    return module


@pytest.fixture
def extension(built: Any, torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The extension, in use, knowing no kernel; and knowing none afterwards, as their memory goes."""
    monkeypatch.setattr(direct, "extension", built)
    engine_module.forget()
    yield built
    built.forget()


@pytest.fixture(params=[False, True], ids=["python", "compiled"])
def way(request: pytest.FixtureRequest, extension: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the extension is in use."""
    if not request.param:
        monkeypatch.setattr(direct, "extension", None)
    return bool(request.param)


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
    with entered() as names:
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
    arguments = leaves()
    y = layer_norm_linear(*arguments)
    tensor = arguments[which]
    assert tensor is not None
    with torch.no_grad():
        tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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


def test_a_gradient_of_another_type(way: bool, torch_driver: FakeDriver) -> None:
    given, grad = [tensor.detach() for tensor in leaves() if tensor is not None], torch.randn(4, 9, 16).to(torch.bfloat16)
    mean, rstd = given[0].mean(-1, keepdim=True), torch.ones(4, 9, 1)
    for _ in range(2):
        found, right = (engine_module.backward(dy, *given[:4], mean, rstd, 1e-5, (True,) * 5) for dy in (grad, grad.float()))
        assert found is not None and right is not None and all(map(torch.allclose, found, right))


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


def test_where_it_cannot_be_compiled_python_serves(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    def none() -> None:
        raise ToolchainError("there is no C++ compiler")

    caplog.set_level(logging.INFO, "tuner")
    monkeypatch.setattr(direct, "find_compiler", none)
    monkeypatch.setattr(direct, "extension", None)
    direct._make()
    assert direct.extension is None and "there is no C++ compiler" in caplog.text
    assert all(tensor is not None for tensor in gradients(leaves(), torch.randn(4, 9, 16)))


def test_it_is_made_once_and_beside_the_calls(monkeypatch: pytest.MonkeyPatch, built: Any) -> None:
    roots = []

    def build(store: Store, compiler: Any) -> Any:
        roots.append(store.root)
        return built

    for name, value in (("build", build), ("extension", None), ("_thread", None)):
        monkeypatch.setattr(direct, name, value)
    threads = {direct.start() for _ in range(3)}
    assert len(threads) == 1
    threads.pop().join()
    assert direct.extension is built and len(roots) == 1 and isinstance(roots[0], Path)


def test_without_a_lock_what_is_compiled_serves(store: Store, monkeypatch: pytest.MonkeyPatch, built: Any,
                                                tmp_path: Path) -> None:
    """A store that cannot be written has no lock, but may have the library."""
    monkeypatch.setattr(direct, "_LOCK", str(tmp_path))  # a folder
    monkeypatch.setattr(direct, "extension", None)
    monkeypatch.setattr(direct, "Store", lambda: store)
    direct._make()
    assert direct.extension is not None


def test_a_program_that_ends_leaves_no_compiler_behind(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo c++ 1.0 && exit\n"
                        "echo $$ >> ../../../pids\nsh -c 'echo $$ >> ../../../pids; sleep 300; :'\n")
    compiler.chmod(0o755)
    code = ("from tuner.torch import direct\nfrom pathlib import Path\nimport time\ndirect.start()\n"
            f"while len(Path({str(tmp_path / 'pids')!r}).read_text().split()) < 2: time.sleep(0.05)")
    (tmp_path / "pids").write_text("")
    environment = {**os.environ, "CXX": str(compiler), "LNL_STORE": str(tmp_path / "store")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(running(pid) for pid in pids), 10.0)
    assert list((tmp_path / "store").glob("*/*")) == []
