"""What a backward call on a GPU costs the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.torch_on_gpu import on_gpu, torch_forward, without_python
from tuner.torch import direct, layer_norm_linear, ops

pytestmark = pytest.mark.cuda

CALL_US = 15.0
"""What a backward call may cost the CPU, beside what autograd itself does."""

SPELLS, SPELL_S = 8, 0.5


@pytest.mark.parametrize(("rows", "hidden", "out"), [(16, 8, 16), (8192, 768, 3072)], ids=str)
def test_a_call_costs_the_cpu_little(record_property: Callable[[str, object], None], rows: int, hidden: int, out: int) -> None:
    """The second shape takes several launches and a workspace."""
    arguments = [None if tensor is None else tensor.detach() for tensor in on_gpu(rows, hidden=hidden, out=out)]
    grad = torch.randn(rows, out, device="cuda")
    _, mean, rstd = ops.forward(*arguments, 1e-5, None)
    needs = (True,) * 5

    def call() -> None:
        ops.backward(grad, *arguments[:4], mean, rstd, 1e-5, None, needs)

    direct.start().join()
    assert direct.extension is not None  # what Python takes until then is not what is asked about
    call()
    least = cpu_us(call, CALL_US)
    record_property("call_us", least)
    print(f"a backward call at {rows},{hidden},{out} costs the CPU {least:.1f} us")
    assert least < CALL_US


def test_a_chain_of_layers_costs_the_cpu_less_than_with_pytorchs_own(record_property: Callable[[str, object], None]) -> None:
    """Most of what autograd.grad takes is the way to its thread and back, which one layer pays as twenty do."""
    direct.start().join()
    first, *others = [on_gpu(16, hidden=16, out=16) for _ in range(21)]
    grad = torch.randn(16, 16, device="cuda")
    costs = {}

    def grads_of(layers: list[list[Tensor | None]], function: Callable[..., Tensor]) -> Callable[[], object]:
        y, wanted = layers[0][0], [layers[0][0], *(tensor for layer in layers for tensor in layer[1:])]
        for layer in layers:
            y = function(y, *layer[1:])
        return lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True)

    for name, function in (("the tuned", layer_norm_linear), ("PyTorch's own", torch_forward)):
        one, many = grads_of([first], function), grads_of([first, *others], function)
        one()
        with without_python() if name == "the tuned" else nullcontext():
            costs[name] = (cpu_us(many) - cpu_us(one)) / len(others)
        record_property(name, costs[name])
        print(f"in a long backward pass a layer of {name} costs the CPU {costs[name]:.1f} us")
    assert costs["the tuned"] < costs["PyTorch's own"]


def cpu_us(call: Callable[[], object], enough: float = math.inf) -> float:
    """Microseconds of CPU that a call takes: the least, in several spells apart in time, as others at work on the machine can
    only add to it, some for seconds. A time below `enough` is enough."""
    least = math.inf
    for spell in range(SPELLS):
        time.sleep(0.5 if spell > 0 else 0.0)
        begun = time.perf_counter()
        while time.perf_counter() - begun < SPELL_S:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                call()
            least = min(least, (time.perf_counter() - begin) / 10 * 1e6)
        if least < enough:
            break
    return least
