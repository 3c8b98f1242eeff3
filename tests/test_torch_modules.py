"""The module, torch.compile and DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.nn.utils.prune
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.fake_driver import FakeDriver
from tests.torch_on_host import LIMITS, close, exact, install, leaves
from tuner.executors.host import HostExecutor
from tuner.store import Store
from tuner.torch import LayerNormLinear, layer_norm_linear

pytestmark = [pytest.mark.filterwarnings("error:PyTorch's own kernels"), pytest.mark.usefixtures("seeded_torch")]


# --- the module --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_module_is_its_pair(bias: bool) -> None:
    module = LayerNormLinear(8, 5, eps=1e-3, bias=bias)
    norm, linear = module.to_pair()
    x = torch.randn(3, 8)
    assert torch.equal(module(x), linear(norm(x)))
    assert set(module.state_dict()) == {"norm.weight", "linear.weight", *(("norm.bias", "linear.bias") if bias else ())}
    again = LayerNormLinear.from_pair(norm, linear)
    assert again.linear.weight is linear.weight and torch.equal(again(x), module(x))


def test_states_map_to_and_from_a_pair() -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 5)
    nn.init.normal_(norm.weight)
    module = LayerNormLinear(8, 5)
    module.norm.load_state_dict(norm.state_dict())
    module.linear.load_state_dict(linear.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(module(x), linear(norm(x)))
    assert "8, 5" in repr(module)


@pytest.mark.parametrize(("norm", "linear"), [
    (nn.LayerNorm(8), nn.Linear(9, 5)), (nn.LayerNorm((2, 8)), nn.Linear(8, 5)), (nn.Linear(8, 8), nn.Linear(8, 5)),
    (nn.LayerNorm(8), nn.Identity())], ids=["sizes", "two dimensions", "no LayerNorm", "no Linear"])
def test_what_is_no_pair(norm: Any, linear: Any) -> None:
    with pytest.raises(ValueError, match="LayerNorm"):
        LayerNormLinear.from_pair(norm, linear)


@pytest.mark.parametrize("change", [
    lambda module: torch.nn.utils.prune.l1_unstructured(module.linear, "weight", 0.5),
    lambda module: torch.nn.utils.weight_norm(module.linear),
    lambda module: setattr(module, "linear", nn.Identity())], ids=["pruned", "normed", "other"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parts_of_a_module_are_called_where_they_do_more(torch_driver: FakeDriver, change: Callable[[Any], None]) -> None:
    module, x = LayerNormLinear(8, 5), torch.randn(3, 8)
    change(module)
    for _ in range(2):
        y = module(x)
        assert torch.equal(y, module.linear(module.norm(x)))
        y.sum().backward()
    assert torch_driver.log == []


# --- torch.compile -----------------------------------------------------------------------------------------------------------


def test_compiled_graphs_keep_the_operation_and_follow_the_rows(torch_driver: FakeDriver) -> None:
    """The backward pass is the operation and nothing else; the forward pass is PyTorch's, for the compiler to fuse."""
    torch.compiler.reset()
    forward: list[list[str]] = []
    backward: list[list[str]] = []

    def note(graphs: list[list[str]]) -> Callable[..., Any]:
        def compiler(graph: Any, example: Any) -> Any:
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=note(forward), bw_compiler=note(backward))
    module = torch.compile(LayerNormLinear(24, 16), backend=backend, fullgraph=True, dynamic=True)
    compiled = []
    for rows in (36, 20, 21, 57):
        arguments = leaves((rows,))
        assert arguments[0] is not None
        grad = torch.randn(rows, 16)
        y = module(arguments[0])
        y.backward(grad)
        given = [arguments[0], module.norm.weight, module.norm.bias, module.linear.weight, module.linear.bias]
        assert close(arguments[0].grad, exact(given, grad)[0], LIMITS[torch.float32])
        compiled.append(len(forward))
    assert len(set(compiled)) == 1 and len(forward) == len(backward)
    assert all(["lnl" in target for target in graph].count(True) == 1 and not any("native" in target for target in graph)
               for graph in backward)
    assert not any("lnl" in target for graph in forward for target in graph)
    assert torch_driver.log


def test_compiled_autocast(torch_driver: FakeDriver) -> None:
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(*given: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer_norm_linear(*given)

    arguments, grad = leaves((36,)), torch.randn(36, 16).bfloat16()
    y = step(*arguments)
    y.backward(grad)
    assert y.dtype == torch.bfloat16
    right = exact(arguments, grad)
    assert all(tensor is not None and close(tensor.grad, value, 2 * LIMITS[torch.bfloat16])
               for tensor, value in zip(arguments, right, strict=True))


# --- data parallel -----------------------------------------------------------------------------------------------------------


def _train(rank: int, world: int, folder: str, tuned: bool) -> None:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    if tuned:
        from codegen.limits import target

        store = Store()
        install(patch, HostExecutor(target("sm_90"), store), store)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(LayerNormLinear(24, 16), nn.GELU(), LayerNormLinear(16, 8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(3, world, 6, 24)
    for step in range(3):
        optimizer.zero_grad()
        model(data[step, rank]).square().mean().backward()
        optimizer.step()
    torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
    # Not by returning. That frees the model, whose reducer joins Gloo's thread while it holds the interpreter's lock; the thread
    # may still wait for that lock to free what it did last, and both wait for ever, whatever the layers (pytorch/pytorch#56297).
    os._exit(0)


def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train, (2, str(tmp_path), True), nprocs=2)
    torch.manual_seed(0)
    model = nn.Sequential(LayerNormLinear(24, 16), nn.GELU(), LayerNormLinear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(3, 2, 6, 24)
    for step in range(3):
        optimizer.zero_grad()
        model(data[step].reshape(12, 24)).square().mean().backward()
        optimizer.step()
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for key, value in model.state_dict().items():
        assert torch.equal(states[0][key], states[1][key])
        assert torch.allclose(states[0][key], value, rtol=1e-4, atol=1e-6)
