"""tuner.backward on tensors and arrays that lie on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tuner
from codegen.problem import GRADIENTS
from tests.torch_on_gpu import check, on_gpu
from tests.torch_on_host import LIMITS
from tuner.compare import bound_fault
from tuner.inputs import Gradients, random_inputs

pytestmark = pytest.mark.cuda

BUSY = 200_000_000
"""Clock cycles for which a stream is kept busy, a tenth of a second: far longer than any call here."""


@pytest.mark.two_gpus
def test_tuner_backward_off_the_current_gpu() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(0)
    arguments, dy = on_gpu(40, device=str(last)), torch.randn(40, 16, device=last)
    results = tuner.backward(dy, *arguments[:4])  # type: ignore[arg-type]
    assert torch.cuda.current_device() == 0
    assert all(getattr(results, name).device == last for name in GRADIENTS)
    check(arguments, [getattr(results, name) for name in GRADIENTS], dy, LIMITS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_go_through_tuner_backward_without_copies(dtype: torch.dtype) -> None:
    arguments = on_gpu(4, 33, hidden=128, out=64, dtype=dtype)
    x, gamma, beta, w, _ = arguments
    dy = torch.randn(4, 33, 64, device="cuda").to(dtype)
    results = tuner.backward(dy, x, gamma, beta, w)  # type: ignore[arg-type]
    assert results.dx is not None and type(results.dx) is Tensor and results.dx.shape == (4, 33, 128)
    check(arguments, [getattr(results, name) for name in GRADIENTS], dy, LIMITS[dtype])


@pytest.mark.parametrize("config", ["row_warp:reduction=atomic", "row_warp:reduction=two_pass"])
def test_tensors_accumulate(config: str) -> None:
    arguments = on_gpu(132, hidden=128, out=64)
    x, gamma, beta, w, _ = arguments
    dy = torch.randn(132, 64, device="cuda")
    shapes = {"dgamma": (128,), "dbeta": (128,), "dw": (64, 128), "db": (64,)}
    out = {name: torch.zeros(shape, device="cuda") for name, shape in shapes.items()}
    for _ in range(2):
        results = tuner.backward(dy, x, gamma, beta, w, out=out, accumulate=True, config=config)  # type: ignore[arg-type]
    assert results.dw is out["dw"]
    check(arguments, [results.dx, *(tensor / 2 for tensor in out.values())], dy, LIMITS[torch.float32])


def test_gpu_arrays_go_through_tuner_backward_without_copies() -> None:
    import pycuda.driver as driver
    import pycuda.gpuarray as gpuarray

    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    try:
        given = random_inputs(132, 128, 64)
        arrays = [gpuarray.to_gpu(array) for array in (given.dy, given.x, given.gamma, given.beta, given.w)]
        results = tuner.backward(*arrays)
        got = {name: getattr(results, name).get() for name in GRADIENTS}
        assert bound_fault(given, Gradients(**got)) is None
    finally:
        driver.Context.pop()


def test_a_given_stream_owns_what_is_made_for_it() -> None:
    arguments = on_gpu(4096, hidden=256, out=64)
    x, gamma, beta, w, _ = arguments
    dy, stream = torch.randn(4096, 64, device="cuda"), torch.cuda.Stream()
    tuner.backward(dy, x, gamma, beta, w)  # type: ignore[arg-type]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
    results = tuner.backward(dy, x, gamma, beta, w, stream=stream)  # type: ignore[arg-type]
    for _ in range(50):  # would take the scratch memory, were it not the stream's
        torch.empty(1 << 22, device="cuda", dtype=torch.uint8).fill_(0xFF)
    torch.cuda.current_stream().wait_stream(stream)
    check(arguments, [getattr(results, name) for name in GRADIENTS], dy, LIMITS[torch.float32])
