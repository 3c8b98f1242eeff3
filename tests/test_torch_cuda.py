"""The tuned backward pass under PyTorch on a GPU: streams, graphs, compilation, devices."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.torch_on_gpu import check, grads, on_gpu, torch_forward, without_python
from tests.torch_on_host import LIMITS, close, exact
from tuner.errors import LaunchError
from tuner.launcher.program import Replay
from tuner.torch import LayerNormLinear, convert, direct, engine, layer_norm_linear, ops
from tuner.torch.module import FusedLinear

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("error:PyTorch's own kernels")]

ROOT = Path(__file__).resolve().parent.parent
BUSY = 200_000_000
"""Clock cycles for which a stream is kept busy, a tenth of a second: far longer than any call here."""


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the extension in C++ is in use."""
    direct.start().join()
    assert direct.extension is not None
    if not request.param:
        monkeypatch.setattr(direct, "extension", None)
    engine.forget()
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "hidden", "out"), [((4, 4), 8, 16), ((2, 71), 229, 33), ((8, 128), 256, 1024)], ids=str)
def test_gradients(way: bool, dtype: torch.dtype, rows: tuple[int, ...], hidden: int, out: int) -> None:
    arguments = on_gpu(*rows, hidden=hidden, out=out, dtype=dtype)
    grad = torch.randn(*rows, out, device="cuda").to(dtype)
    for known in (False, True):
        y = layer_norm_linear(*arguments)
        assert torch.equal(y, torch_forward(*arguments))
        with without_python() if way and known else nullcontext():
            found = torch.autograd.grad(y, arguments, grad)
        check(arguments, list(found), grad, LIMITS[dtype])


@pytest.mark.parametrize(("data", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
                                            (torch.float32, torch.float16)])
def test_autocast_is_pytorchs(data: torch.dtype, cast: torch.dtype) -> None:
    arguments = on_gpu(8, 33, hidden=256, out=96, dtype=data, param_dtype=torch.float32)
    grad = torch.randn(8, 33, 96, device="cuda").to(cast)
    with torch.autocast("cuda", cast):
        y = layer_norm_linear(*arguments)
        assert torch.equal(y, torch_forward(*arguments))
    y.backward(grad)
    check(arguments, grads(arguments), grad, 2 * LIMITS[cast])


@pytest.mark.parametrize("absent", ["weight", "bias", "linear_bias", "weight,bias,linear_bias"])
def test_absent_parameters(absent: str) -> None:
    arguments = on_gpu(40, absent=absent)
    grad = torch.randn(40, 16, device="cuda")
    layer_norm_linear(*arguments).backward(grad)
    check(arguments, grads(arguments), grad, LIMITS[torch.float32])


@pytest.mark.parametrize("make", [lambda: torch.ones((), device="cuda").expand(4, 9, 16),
                                  lambda: torch.randn(4, 1, 16, device="cuda").expand(4, 9, 16),
                                  lambda: torch.randn(9, 16, 4, device="cuda").permute(2, 0, 1)])
def test_l1_gradients_of_any_strides(make: Callable[[], Tensor]) -> None:
    arguments, grad = on_gpu(4, 9), make()
    layer_norm_linear(*arguments).backward(grad)
    check(arguments, grads(arguments), grad, LIMITS[torch.float32])


def test_a_late_producer_on_a_side_stream_is_waited_for(way: bool) -> None:
    arguments, late = on_gpu(512, hidden=256, out=64), torch.randn(512, 64, device="cuda")
    torch.autograd.grad(layer_norm_linear(*arguments), arguments, late)  # compiled before
    grad = torch.full_like(late, float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = layer_norm_linear(*arguments)
        torch.cuda._sleep(BUSY)
        grad.copy_(late)
        found = torch.autograd.grad(y, arguments, grad)
        assert not stream.query()  # nothing was waited for
    torch.cuda.current_stream().wait_stream(stream)
    check(arguments, list(found), late, LIMITS[torch.float32])


def test_a_captured_graph_follows_its_inputs(way: bool) -> None:
    arguments, grad = on_gpu(256, hidden=128, out=64), torch.randn(256, 64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(2):
        with torch.no_grad():
            for tensor in arguments:
                assert tensor is not None
                tensor.normal_()
            grad.normal_()
        graph.replay()
        check(arguments, list(found), grad, LIMITS[torch.float32])


def test_what_is_made_beside_a_capture_does_not_end_it(way: bool) -> None:
    """A stream is captured in the mode that forbids every thread what takes memory. Another stream gets its graph meanwhile."""
    x, *others = (tensor.detach() for tensor in on_gpu(16, hidden=8, out=16) if tensor is not None)
    grad = torch.randn(16, 16, device="cuda")
    _, mean, rstd = ops.forward(x, *others, 1e-5, None)

    def call() -> list[Tensor]:
        return ops.backward(grad, x, *others[:3], mean, rstd, 1e-5, None, (True,) * 5)

    captured, beside, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    captured.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(captured):
        call()
    (replay,) = (value for key, value in engine._ready.items() if key[1:3] == (8, 16) and key[-2] == 16 and value is not None)
    assert replay._graphs is not None
    before = graphs_of(replay)
    with torch.cuda.graph(graph, stream=captured, capture_error_mode="global"):
        found = call()
        with torch.cuda.stream(beside):
            at_once = call()
    assert graphs_of(replay) == before + 1
    graph.replay()
    torch.cuda.synchronize()
    right = exact([tensor.requires_grad_() for tensor in (x, *others)], grad)
    for results in (found, at_once):
        assert all(close(got, value, LIMITS[torch.float32]) for got, value in zip(results, right, strict=True))


def graphs_of(replay: Replay) -> int:
    """How many graphs there are of a kernel: the second field of Graphs in replay.cpp."""
    return ctypes.c_uint.from_buffer(replay._graphs, 4).value


def test_a_kernel_that_is_not_loaded_cannot_be_captured() -> None:
    arguments, grad = on_gpu(17, hidden=19, out=23), torch.randn(17, 23, device="cuda")
    nn.functional.linear(nn.functional.layer_norm(arguments[0], (19,)), arguments[3])  # PyTorch's own libraries are ready
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad)
    torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch.compiler.reset()
    layers = nn.Linear(64, 256), nn.GELU(), LayerNormLinear(256, 64), nn.LayerNorm(64), nn.Linear(64, 64)
    model = convert(nn.Sequential(*layers).cuda())
    assert type(model[4]) is FusedLinear
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(32, 16, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        model(x).square().sum().backward()
        right = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        compiled(x).square().sum().backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert len(found) == len(right) == 10
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item()) for a, b in zip(found, right, strict=True))


def test_compiled_for_any_number_of_rows() -> None:
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(LayerNormLinear(128, 64).cuda(), backend=graphs, fullgraph=True, dynamic=True)
    counts = []
    for rows in (512, 300, 301, 77):
        compiled(torch.randn(rows, 128, device="cuda", requires_grad=True)).sum().backward()
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.two_gpus
def test_the_last_gpu_leaves_the_first_current(way: bool) -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(0)
    arguments, grad = on_gpu(40, device=str(last)), torch.randn(40, 16, device=last)
    for _ in range(2):  # the second time its kernel is known
        found = torch.autograd.grad(layer_norm_linear(*arguments), arguments, grad)
        assert torch.cuda.current_device() == 0
        check(arguments, list(found), grad, LIMITS[torch.float32])


@pytest.mark.two_gpus
def test_two_gpus_in_one_backward_pass(way: bool) -> None:
    """Each has a thread of autograd of its own, and a kernel; a tensor goes from one to the other in the middle."""
    torch.cuda.set_device(0)
    first, second = on_gpu(40, hidden=24, out=24), on_gpu(40, hidden=24, out=16, device="cuda:1", seed=1)
    plain = [[None if tensor is None else tensor.detach().cpu().double().requires_grad_() for tensor in layer]
             for layer in (first, second)]
    grad = torch.randn(40, 16)
    right = torch.autograd.grad(torch_forward(torch_forward(*plain[0]), *plain[1][1:]), [*plain[0], *plain[1][1:]], grad.double())
    for _ in range(2):
        y = layer_norm_linear(layer_norm_linear(*first).to("cuda:1"), *second[1:])
        found = torch.autograd.grad(y, [*first, *second[1:]], grad.to("cuda:1"))
        assert torch.cuda.current_device() == 0
        assert [tensor.get_device() for tensor in found] == [0] * 5 + [1] * 4
        assert all(close(got.cpu(), value, 1e-5) for got, value in zip(found, right, strict=True))


@pytest.mark.parametrize(("precision", "limit"), [("tf32", LIMITS[torch.float32] * 500), ("ieee", LIMITS[torch.float32])])
def test_a_precision_set_for_cuda_alone(precision: str, limit: float) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        arguments, grad = on_gpu(256, hidden=128, out=64), torch.randn(256, 64, device="cuda")
        layer_norm_linear(*arguments).backward(grad)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    check(arguments, grads(arguments), grad, limit)


def test_transforms_of_torch_func_take_pytorchs_own_path() -> None:
    given = [tensor.detach() for tensor in on_gpu(9) if tensor is not None]

    def loss(x: Tensor) -> Tensor:
        return layer_norm_linear(x, *given[1:]).square().sum()

    x = given[0].clone().requires_grad_()
    loss(x).backward()
    assert x.grad is not None
    for found in (torch.func.grad(loss)(given[0]), torch.func.vmap(torch.func.grad(loss))(given[0])):
        assert torch.allclose(found, x.grad, rtol=1e-3, atol=1e-3)


def test_repeated_backward_passes_agree() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS, in the forward pass, may only promise so much
    try:
        arguments, grad = on_gpu(1000, hidden=128, out=64), torch.randn(1000, 64, device="cuda")
        y = layer_norm_linear(*arguments)
        first = torch.autograd.grad(y, arguments, grad, retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(y, arguments, grad, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.lnl.layer_norm_linear.default, (*on_gpu(4, 9), 1e-5, None))


def test_a_converted_model_trains_as_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32)).cuda()
    state, losses = {key: value.clone() for key, value in model.state_dict().items()}, []
    for tuned in (False, True):
        model.load_state_dict(state)
        if tuned:
            convert(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(1)
        for _ in range(20):
            loss = (model(torch.randn(256, 64, device="cuda")) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("first", ["torch", "pycuda.driver"])
def test_t7_in_either_order_beside_pycuda(first: str) -> None:
    code = _BOTH.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr


_BOTH = """
import {first}
import numpy as np
import torch, tuner
from tuner.torch import layer_norm_linear
from tuner.inputs import random_inputs
given = random_inputs(40, 24, 16)
leaves = [torch.tensor(array, device="cuda").requires_grad_() for array in (given.x, given.gamma, given.beta, given.w)]
for _ in range(2):
    got = tuner.backward(given.dy, given.x, given.gamma, given.beta, given.w)
    found = torch.autograd.grad(layer_norm_linear(*leaves), leaves, torch.tensor(given.dy, device="cuda"))
    for array, tensor in zip((got.dx, got.dgamma, got.dbeta, got.dw), found):
        assert np.allclose(array, tensor.cpu().numpy(), rtol=1e-4, atol=1e-4)
assert torch.randn(64, 64, device="cuda").matmul(torch.eye(64, device="cuda")).isfinite().all()
print("right")
"""
