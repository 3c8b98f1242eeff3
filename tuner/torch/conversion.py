"""`convert`, which finds pairs of nn.LayerNorm and nn.Linear in a model and makes each one operation, and `unconvert`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tuner.torch.module import FusedLinear, LayerNormLinear, Pair, PassedLayerNorm, why_no_pair

_UNTRACEABLE = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What models raise whose code does more with tensors than torch.fx can follow."""


def convert(model: nn.Module, pairs: Iterable[tuple[str, str]] | None = None) -> nn.Module:
    """Lets every nn.Linear whose input is the output of an nn.LayerNorm do both; parameters, names and state_dict stay the same.

    Convert last, when the model has its final form: what the code of the model does is looked at once, in training and in
    evaluation mode. A pair whose LayerNorm or Linear is later replaced, wrapped (as adapters do) or hooked, or copied without the
    other, is two plain modules again, on its own; so are pairs under nn.DataParallel, and those whose halves are sharded apart.

    Args:
        model: it is changed in place. A model that torch.fx can trace is searched for pairs, and so is one that is itself
            nn.Sequential. In others no code says what becomes of a LayerNorm's output, and nothing is converted, with a warning
            that has the pairs which stand next to each other in an nn.Sequential.
        pairs: the names of a LayerNorm and a Linear, such as ("ln_2", "mlp.0"), where the caller knows that the output of the
            first goes to the second and nowhere else. None: they are searched for.

    Returns:
        The model.

    Raises:
        ValueError: a name given is no module, or a pair given is none.
    """
    found = _search(model) if pairs is None else list(pairs)
    modules = dict(model.named_modules(remove_duplicate=False))
    for norm_name, linear_name in found:
        if missing := [name for name in (norm_name, linear_name) if name not in modules]:
            raise ValueError(f"the model has no module {missing[0]!r}")
        norm, linear = modules[norm_name], modules[linear_name]
        if (reason := why_no_pair(norm, linear)) is not None:
            raise ValueError(f"{norm_name} and {linear_name} cannot be converted: {reason}")
        places = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in (norm_name, linear_name)]
        # Only what they do changes: references to them, optimizers and names stay valid.
        norm.__class__, linear.__class__ = PassedLayerNorm, FusedLinear
        norm._pair = linear._pair = Pair(norm, places[0], linear, places[1])
    return model


def unconvert(model: nn.Module) -> nn.Module:
    """Makes every converted pair in a model two plain modules again, as before parts of it are copied or wrapped; in place.

    Returns:
        The model.
    """
    for module in model.modules():
        if isinstance(module, PassedLayerNorm | FusedLinear):
            module.__class__ = nn.LayerNorm if isinstance(module, PassedLayerNorm) else nn.Linear
            del module._pair
    return model


class _Tracer(torch.fx.Tracer):
    """Looks into all modules but PyTorch's own, this package's, and those that it is told.

    Args:
        is_leaf: of further modules, whether to leave them unopened.
    """

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """As torch.fx.Tracer.is_leaf_module."""
        ours = isinstance(m, LayerNormLinear | FusedLinear | PassedLayerNorm)
        return ours or self._is_leaf(m) or super().is_leaf_module(m, module_qualified_name)


def _search(model: nn.Module) -> list[tuple[str, str]]:
    try:
        return _traced_both_ways(model, lambda module: False)
    except _UNTRACEABLE as error:
        if type(model) is nn.Sequential:  # whose own code is known, whatever its parts do
            return _traced_both_ways(model, lambda module: type(module) is not nn.Sequential)
        if neighbours := _neighbours(model):
            warnings.warn(f"nothing was converted, as the model's code cannot be traced ({type(error).__name__}: {error}); "
                          f"of these {len(neighbours)} pairs, give those that hold to convert in pairs: {neighbours}",
                          stacklevel=3)
        return []


def _traced_both_ways(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> list[tuple[str, str]]:
    """The pairs both in training and in evaluation, between which code may choose."""
    training = [(module, module.training) for module in model.modules()]
    try:
        found = []
        for mode in (True, False):
            for module, _ in training:
                module.training = mode
            found.append(_traced(model, is_leaf))
    finally:
        for module, before in training:
            module.training = before
    return [pair for pair in found[0] if pair in found[1]]


def _traced(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> list[tuple[str, str]]:
    calls = [node for node in _Tracer(is_leaf).trace(model).nodes if node.op == "call_module"]
    modules, times = dict(model.named_modules()), Counter(call.target for call in calls)
    owned_once = _owned_once(model)
    pairs = []
    for node in calls:
        users = list(node.users)
        if len(users) != 1 or users[0].op != "call_module" or users[0].args != (node,):
            continue
        pair = node.target, users[0].target
        norm, linear = (modules[name] for name in pair)
        once = all(times[name] == 1 for name in pair) and owned_once(norm) and owned_once(linear)
        if once and why_no_pair(norm, linear) is None:
            pairs.append(pair)
    return pairs


def _neighbours(model: nn.Module) -> list[tuple[str, str]]:
    """The pairs that stand next to each other in an nn.Sequential."""
    pairs, owned_once = [], _owned_once(model)
    for prefix, module in model.named_modules():
        if type(module) is nn.Sequential:
            names = [f"{prefix}.{name}".lstrip(".") for name in module._modules]
            inner = list(module)
            pairs += [(names[i], names[i + 1]) for i in range(len(inner) - 1) if why_no_pair(inner[i], inner[i + 1]) is None
                      and owned_once(inner[i]) and owned_once(inner[i + 1])]
    return pairs


def _owned_once(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a module has one name in the model: code may reach those that have several by each of them."""
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return lambda module: names[id(module)] == 1
