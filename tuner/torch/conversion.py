"""`convert`, which finds pairs of nn.LayerNorm and nn.Linear in a model and makes each one operation, and `unconvert`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

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
    Use `unconvert` before you build another model of their modules.

    Args:
        model: it is changed in place. Its code is searched for pairs as far as torch.fx can trace it. Where that fails, in the
            model or in a module of it, nothing says what becomes of a LayerNorm's output; a warning then names the pairs that
            were found in the modules below, but not converted.
        pairs: the names of a LayerNorm and a Linear, such as ("ln_2", "mlp.0"), where the caller knows that the output of the
            first goes to the second and nowhere else. None: they are searched for.

    Returns:
        The model.

    Raises:
        ValueError: a name given is no module, or a pair given is none. The model is as it was.
    """
    found = _search(model) if pairs is None else list(pairs)
    modules = dict(model.named_modules(remove_duplicate=False))
    begun: list[nn.Module] = []
    try:
        for pair in found:
            begun += _paired(modules, pair)
    except ValueError:
        for module in begun:
            _make_plain(module)
        raise
    return model


def _paired(modules: Mapping[str, nn.Module], pair: tuple[str, str]) -> tuple[nn.Module, nn.Module]:
    """The two modules of a pair, which are one operation from now on. Raises ValueError as `convert`."""
    if isinstance(pair, str) or len(pair) != 2:
        raise ValueError(f'a pair is the names of a LayerNorm and a Linear, such as ("ln_2", "mlp.0"), not {pair!r}')
    norm_name, linear_name = pair
    if missing := [name for name in pair if name not in modules]:
        raise ValueError(f"the model has no module {missing[0]!r}")
    norm, linear = modules[norm_name], modules[linear_name]
    if (reason := why_no_pair(norm, linear)) is not None:
        raise ValueError(f"{norm_name} and {linear_name} cannot be converted: {reason}")
    places = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in pair]
    # Only what they do changes: references to them, optimizers and names stay valid.
    norm.__class__, linear.__class__ = PassedLayerNorm, FusedLinear
    norm._pair = linear._pair = Pair(norm, places[0], linear, places[1])
    return norm, linear


def _make_plain(module: nn.Module) -> None:
    """Of a pair's modules one."""
    module.__class__ = nn.LayerNorm if isinstance(module, PassedLayerNorm) else nn.Linear
    del module._pair


def unconvert(model: nn.Module) -> nn.Module:
    """Makes every converted pair in a model two plain modules again, as before parts of it are copied or wrapped; in place.

    Returns:
        The model.
    """
    for module in model.modules():
        if isinstance(module, PassedLayerNorm | FusedLinear):
            _make_plain(module)
    return model


class _Tracer(torch.fx.Tracer):
    """Looks into all modules but PyTorch's own, this package's, and those that it is told.

    Args:
        closed: further modules to leave unopened.

    Attributes:
        failed: the innermost module whose code could not be followed; None: that of the model itself, if any.
    """

    def __init__(self, closed: set[nn.Module]) -> None:
        super().__init__()
        self._closed = closed
        self.failed: nn.Module | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """As torch.fx.Tracer.is_leaf_module."""
        ours = isinstance(m, LayerNormLinear | FusedLinear | PassedLayerNorm)
        return ours or m in self._closed or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """As torch.fx.Tracer.call_module."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except _UNTRACEABLE:
            self.failed = self.failed or m
            raise


class _Search:
    """The pairs in a model, by names.

    Attributes:
        found: the pairs in code that could be followed.
        unsure: those that would be pairs, were the modules around them called by their own code alone.
        closed: the modules whose code could not be followed, with their names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.unsure: list[tuple[str, str]] = []
        self.closed: dict[nn.Module, str] = {}
        self._names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        self.found = self._within(model, "")

    def _within(self, model: nn.Module, prefix: str) -> list[tuple[str, str]]:
        """The pairs in a part of the model, whose names begin with the prefix."""
        closed = set[nn.Module]()
        try:
            traced = _traced_both_ways(model, closed)
        except _UNTRACEABLE:
            traced, closed = [], {model}
        names = {module: (prefix + name).rstrip(".") for name, module in model.named_modules()}
        for module in (module for module in names if module in closed):
            self.closed[module] = names[module]
            for name, child in module.named_children():
                self.unsure += self._within(child, f"{names[module]}.{name}.".lstrip("."))
        found = []
        for norm, linear in traced:
            # Code may reach modules that have several names by each of them.
            if self._names[id(norm)] == self._names[id(linear)] == 1 and why_no_pair(norm, linear) is None:
                found.append((names[norm], names[linear]))
        return found


def _search(model: nn.Module) -> list[tuple[str, str]]:
    search = _Search(model)
    if search.unsure:
        where = ", ".join(name or "the model itself" for name in search.closed.values())
        warnings.warn(f"{len(search.unsure)} pairs were not converted, as torch.fx cannot trace the code around them ({where}); "
                      f"give those that hold to convert in pairs: {search.unsure}", stacklevel=3)
    return search.found


def _traced_both_ways(model: nn.Module, closed: set[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """Of which modules one takes the output of the other, and nothing else does, both in training and in evaluation, between
    which code may choose. Modules whose code cannot be followed join those that are closed."""
    training = [(module, module.training) for module in model.modules()]
    try:
        found = []
        for mode in (True, False):
            for module, _ in training:
                module.training = mode
            found.append(_traced(model, closed))
    finally:
        for module, before in training:
            module.training = before
    return [pair for pair in found[0] if pair in found[1]]


def _traced(model: nn.Module, closed: set[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    calls = _calls(model, closed)
    modules, times = dict(model.named_modules()), Counter(call.target for call in calls)
    pairs = []
    for node in calls:
        users = list(node.users)
        if len(users) == 1 and users[0].op == "call_module" and users[0].args == (node,):
            pair = node.target, users[0].target
            if all(times[name] == 1 for name in pair):
                pairs.append((modules[pair[0]], modules[pair[1]]))
    return pairs


def _calls(model: nn.Module, closed: set[nn.Module]) -> list[Any]:
    """The calls of modules in a model."""
    while True:
        tracer = _Tracer(closed)
        try:
            return [node for node in tracer.trace(model).nodes if node.op == "call_module"]
        except _UNTRACEABLE:
            if tracer.failed is None:
                raise
            closed.add(tracer.failed)  # and from the start, as half of its code has left its traces
