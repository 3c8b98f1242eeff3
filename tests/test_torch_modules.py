"""The module, `convert`, torch.compile and DistributedDataParallel."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

from tests.fake_driver import FakeDriver
from tests.torch_on_host import LIMITS, close, exact, install, leaves
from tuner.executors import Executor
from tuner.executors.host import HostExecutor
from tuner.store import Store
from tuner.torch import LayerNormLinear, convert, layer_norm_linear
from tuner.torch.module import FusedLinear, PassedLayerNorm

pytestmark = pytest.mark.filterwarnings("error:PyTorch's own kernels")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, host_executor: Executor, store: Store) -> FakeDriver:
    assert isinstance(host_executor, HostExecutor)
    return install(monkeypatch, host_executor, store)


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


# --- convert -----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Half a transformer: one pair that can be one operation, and a LayerNorm whose output goes to two places."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.q, self.k = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.ln_2, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.ln_1(x)
        x = x + self.q(normal) * self.k(normal)
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
        self.ln, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.sum() > 0:
            y = -y
        result: Tensor = self.fc(self.ln(y))
        return result


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, PassedLayerNorm | FusedLinear)}


def test_pairs_are_found_where_they_are_pairs() -> None:
    model, x = Block(), torch.randn(2, 3, 8)
    before, state = model(x), copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    assert convert(model) is model
    assert converted(model) == {"ln_2", "mlp.0"}
    assert torch.equal(model(x), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    assert converted(convert(model)) == {"ln_2", "mlp.0"}


def test_where_the_code_cannot_be_followed_sequences_are_searched() -> None:
    model, x = Untraceable(), torch.randn(2, 8)
    before = model(x)
    assert converted(convert(model)) == {"inner.0", "inner.1"}
    assert torch.equal(model(x), before)


def test_a_sequence_by_itself() -> None:
    assert converted(convert(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4), nn.LayerNorm(4)))) == {"0", "1"}


def test_pairs_may_be_named() -> None:
    model, x = Untraceable(), torch.randn(2, 8)
    before = model(x)
    assert converted(convert(model, [("ln", "fc")])) == {"ln", "fc"}
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(("pair", "said"), [
    (("ln", "nothing"), "no module 'nothing'"), (("fc", "ln"), "not LayerNorm and Linear"),
    (("ln", "inner.1"), "takes 8 features")])
def test_named_pairs_that_are_none(pair: tuple[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        convert(Untraceable(), [pair])


def test_shared_and_hooked_modules_are_left_alone() -> None:
    shared = nn.LayerNorm(8)
    twice = nn.Sequential(shared, nn.Linear(8, 8), shared, nn.Linear(8, 8))
    assert converted(convert(twice)) == set()
    hooked = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    hooked[0].register_forward_hook(lambda module, given, result: None)
    assert converted(convert(hooked)) == set()


def test_a_converted_model_can_be_copied_saved_and_trained(fake: FakeDriver) -> None:
    model, x = Block(), torch.randn(4, 3, 8)
    plain = copy.deepcopy(model)
    model = copy.deepcopy(convert(model))
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    model = torch.load(held, weights_only=False)
    assert converted(model) == {"ln_2", "mlp.0"}
    for each in (model, plain):
        each(x).square().mean().backward()
    assert fake.log
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)
               for a, b in zip(model.parameters(), plain.parameters(), strict=True) if a.grad is not None and b.grad is not None)


# --- torch.compile -----------------------------------------------------------------------------------------------------------


def test_compiled_graphs_keep_the_operation_and_follow_the_rows(fake: FakeDriver) -> None:
    torch.compiler.reset()
    graphs: list[list[str]] = []

    def backend(graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return aot_eager(graph, example)

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
        compiled.append(len(graphs))
    assert len(set(compiled)) == 1 and all(any("layer_norm_linear" in target for target in graph) for graph in graphs)
    assert fake.log


def test_converted_models_are_compiled_whole(fake: FakeDriver) -> None:
    torch.compiler.reset()
    model, x = convert(Block()), torch.randn(4, 3, 8)
    model(x).square().mean().backward()
    right = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(right) and fake.log
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, right, strict=True))


def test_compiled_autocast(fake: FakeDriver) -> None:
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
    patch.undo()


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
