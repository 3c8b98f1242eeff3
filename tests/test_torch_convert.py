"""`convert`: the pairs it finds, and what may be done to a converted model."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch import Tensor, nn

from tests.fake_driver import FakeDriver
from tuner.torch import LayerNormLinear, convert, unconvert
from tuner.torch.module import FusedLinear, PassedLayerNorm

pytestmark = [pytest.mark.filterwarnings("error:PyTorch's own kernels"), pytest.mark.usefixtures("seeded_torch")]


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


def test_where_the_code_cannot_be_followed_pairs_are_only_named() -> None:
    model = Untraceable()
    with pytest.warns(UserWarning, match=r"^1 pairs were not .* \(the model itself\); .*\[\('inner.0', 'inner.1'\)\]"):
        convert(model)
    assert converted(model) == set()
    around = nn.Sequential(Untraceable(), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    with pytest.warns(UserWarning, match=r"^1 pairs were not .* \(0\); .*\[\('0.inner.0', '0.inner.1'\)\]"):
        convert(around)
    assert converted(around) == {"1.0", "1.1"}


class Indexed(nn.Module):
    """Its code takes an nn.Sequential apart, and cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        h = self.head[0](x)
        result: Tensor = self.head[1](h) + h
        return result


@pytest.mark.filterwarnings("ignore:.* pairs were not converted")
def test_a_sequence_that_is_taken_apart_stays_as_it_is() -> None:
    model, x = Indexed(), torch.randn(2, 8)
    before = model(x)
    assert torch.equal(convert(model)(x), before)
    around = nn.Sequential(model, nn.Linear(8, 8))
    before = around(x)
    assert torch.equal(convert(around)(x), before)


class Layers(nn.Module):
    """Its code cannot be traced, but that of its layers can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if x.sum() > 0 else reversed(self.layers):
            x = layer(x)
        return x


def test_the_pairs_that_are_named_can_be_given() -> None:
    model, x = Layers(), torch.randn(2, 8)
    pairs = [(f"layers.{index}.ln_2", f"layers.{index}.mlp.0") for index in range(2)]
    with pytest.warns(UserWarning, match=re.escape(str(pairs))):
        convert(model)
    before = model(x)
    assert len(converted(convert(model, pairs))) == 4 and torch.equal(model(x), before)


class Noisy(nn.Module):
    """In training something comes between its LayerNorm and its Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.fc, self.rest = nn.LayerNorm(8), nn.Linear(8, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln(x)
        if self.training:
            h = h + 1
        result: Tensor = self.rest(self.fc(h))
        return result


@pytest.mark.parametrize("training", [True, False])
def test_pairs_are_pairs_in_training_and_in_evaluation(training: bool) -> None:
    model, x = Noisy().train(training), torch.randn(2, 8)
    model.rest.eval()
    right = [model.train(mode)(x) for mode in (True, False)]
    model.train(training).rest.eval()
    assert converted(convert(model)) == {"rest.0", "rest.1"}
    assert model.training == training and not model.rest.training
    assert all(torch.equal(model.train(mode)(x), value) for mode, value in zip((True, False), right, strict=True))


def test_a_sequence_by_itself() -> None:
    assert converted(convert(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4), nn.LayerNorm(4)))) == {"0", "1"}


def test_pairs_may_be_named() -> None:
    model, x = Untraceable(), torch.randn(2, 8)
    before = model(x)
    assert converted(convert(model, [("ln", "fc")])) == {"ln", "fc"}
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(("pair", "said"), [
    (("ln", "nothing"), "no module 'nothing'"), (("fc", "ln"), "not LayerNorm and Linear"),
    (("ln", "inner.1"), "takes 8 features"), (("ln",), "a pair is the names"), ("ln", "a pair is the names")])
def test_named_pairs_that_are_none(pair: Any, said: str) -> None:
    """Pairs before them stay plain modules, too."""
    model = Untraceable()
    model.more = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=said):
        convert(model, [("more.0", "more.1"), pair])
    assert converted(model) == set()


def test_shared_and_hooked_modules_are_left_alone() -> None:
    shared = nn.LayerNorm(8)
    twice = nn.Sequential(shared, nn.Linear(8, 8), shared, nn.Linear(8, 8))
    assert converted(convert(twice)) == set()
    hooked = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    hooked[0].register_forward_hook(lambda module, given, result: None)
    assert converted(convert(hooked)) == set()
    wrapped = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    plain = wrapped[0].forward
    wrapped[0].forward = lambda x: plain(x)
    assert converted(convert(wrapped)) == set()


class Owners(nn.Module):
    """Modules of its sequences belong to others too."""

    def __init__(self) -> None:
        super().__init__()
        shared, norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.a, self.b = nn.Sequential(nn.LayerNorm(8), shared), nn.Sequential(nn.LayerNorm(8), shared)
        self.norm, self.c = norm, nn.Sequential(norm, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.c(self.b(self.a(x)))
        return result


def test_modules_with_several_owners_are_left_alone() -> None:
    assert converted(convert(Owners())) == set()
    model = nn.Sequential(Owners(), Untraceable(), nn.LayerNorm(4), nn.Linear(4, 4))
    model[1].inner[0] = nn.Identity()  # so that none is left in what cannot be followed
    assert converted(convert(model)) == {"2", "3"}
    named, x = Owners(), torch.randn(2, 8)
    before = named(x)
    assert converted(convert(named, [("c.0", "c.1")])) == {"norm", "c.1"} and torch.equal(named(x), before)


class Mixed(nn.Module):
    """A module of ours, and a pair that is called from code."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.ln, self.fc = LayerNormLinear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.ln(self.ours(x)))
        return result


def test_a_module_of_ours_does_not_hide_the_other_pairs() -> None:
    model = Mixed()
    assert converted(convert(model)) == {"ln", "fc"}
    assert converted(convert(nn.Sequential(model, nn.LayerNorm(8), nn.Linear(8, 4)))) == {"0.ln", "0.fc", "1", "2"}


# --- what is done to a converted model -----------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """What adapters do: they stand in the place of a Linear, call it, and add what they found in its input."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.extra = base, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.extra(x)
        return result


def adapted(model: nn.Sequential) -> None:
    torch.manual_seed(3)
    model[1] = Adapter(model[1])


def hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, given, result: result * 2)


def hooked_before(model: nn.Sequential) -> None:
    model[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def other_norm(model: nn.Sequential) -> None:
    model[0] = nn.LayerNorm(8, eps=1.0)


def other_linear(model: nn.Sequential) -> None:
    torch.manual_seed(3)
    model[1] = nn.Linear(8, 5)


def other_forward(model: nn.Sequential) -> None:
    plain = model[0].forward
    model[0].forward = lambda x: plain(x) + 1


def pruned(model: nn.Sequential) -> None:
    torch.nn.utils.prune.l1_unstructured(model[1], "weight", 0.5)


def parametrised(model: nn.Sequential) -> None:
    torch.nn.utils.parametrizations.weight_norm(model[1])


@pytest.mark.parametrize("change", [adapted, hooked, hooked_before, other_norm, other_linear, other_forward, pruned,
                                    parametrised, unconvert], ids=lambda change: change.__name__)
def test_a_converted_pair_that_is_changed_is_two_modules_again(
        torch_driver: FakeDriver, change: Callable[[nn.Module], None]) -> None:
    plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))
    nn.init.normal_(plain[0].weight)
    model, x = convert(copy.deepcopy(plain)), torch.randn(3, 8)
    assert converted(model) == {"0", "1"} and type(model(x).grad_fn).__name__ == "_EagerBackward"
    change(model)
    if change is not unconvert:
        change(plain)
    for _ in range(2):
        right, found = plain(x), model(x)
        assert torch.equal(found, right)
        right.sum().backward()
        found.sum().backward()


def test_a_part_that_is_copied_is_what_it_was(torch_driver: FakeDriver) -> None:
    model, h = convert(Block()), torch.randn(2, 8)
    with torch.no_grad():
        model.ln_2.weight.fill_(3.0)
    first, norm = copy.deepcopy(model.mlp)[0], copy.deepcopy(model.ln_2)
    assert torch.equal(first(h), nn.functional.linear(h, first.weight, first.bias))
    assert torch.equal(norm(h), nn.functional.layer_norm(h, (8,), norm.weight, norm.bias))
    again = copy.deepcopy(model)
    assert again.mlp[0]._pair.norm_for(again.mlp[0]) is again.ln_2


def test_replicas_of_data_parallel_models_take_their_own_parameters(torch_driver: FakeDriver) -> None:
    model, h = convert(Block()), torch.randn(2, 8)
    norm, linear = (module._replicate_for_data_parallel() for module in (model.ln_2, model.mlp[0]))
    norm.weight, norm.bias, linear.weight, linear.bias = torch.rand(8), torch.rand(8), torch.rand(16, 8), torch.rand(16)
    normal = nn.functional.layer_norm(h, (8,), norm.weight, norm.bias)
    assert torch.equal(linear(norm(h)), nn.functional.linear(normal, linear.weight, linear.bias))


def test_scripted_models_are_pytorchs_own() -> None:
    model, x = nn.Sequential(LayerNormLinear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5)), torch.randn(3, 8)
    before = model(x)
    assert torch.equal(torch.jit.script(convert(model))(x), before)


def test_a_converted_model_can_be_copied_saved_and_trained(torch_driver: FakeDriver) -> None:
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
    assert torch_driver.log
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)
               for a, b in zip(model.parameters(), plain.parameters(), strict=True) if a.grad is not None and b.grad is not None)


def test_converted_models_are_compiled_whole(torch_driver: FakeDriver) -> None:
    torch.compiler.reset()
    model, x = convert(Block()), torch.randn(4, 3, 8)
    model(x).square().mean().backward()
    right = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(right) and torch_driver.log
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("change", [adapted, other_norm, other_linear, unconvert], ids=lambda change: change.__name__)
def test_a_pair_that_is_changed_is_compiled_anew(
        torch_driver: FakeDriver, change: Callable[[nn.Module], None]) -> None:
    torch.compiler.reset()
    model, x = convert(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))), torch.randn(3, 8)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    change(model)
    assert torch.allclose(compiled(x), model(x), rtol=1e-6, atol=1e-6)
