"""LayerNormLinear, a module, and `convert`, which finds pairs of nn.LayerNorm and nn.Linear in a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from tuner.torch.function import layer_norm_linear

_UNTRACEABLE = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What models raise whose code does more with tensors than torch.fx can follow."""


class LayerNormLinear(nn.Module):
    """Linear(LayerNorm(x)) with the tuned backward pass.

    Its parameters are those of `norm`, an nn.LayerNorm, and `linear`, an nn.Linear, which also initialise them, so that the keys
    of its state are norm.weight, norm.bias, linear.weight and linear.bias.

    Args:
        hidden: H, the features of x.
        out: O, those of y.
        eps: of the LayerNorm.
        bias: whether the Linear has one, and the LayerNorm a shift.
        device, dtype: of the parameters.
    """

    def __init__(self, hidden: int, out: int, eps: float = 1e-5, bias: bool = True, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps, bias=bias, device=device, dtype=dtype)
        self.linear = nn.Linear(hidden, out, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_pair(cls, norm: nn.LayerNorm, linear: nn.Linear) -> Self:
        """A module that takes over the parameters of both, the same objects.

        Raises:
            ValueError: they are no such pair.
        """
        if (reason := why_no_pair(norm, linear)) is not None:
            raise ValueError(reason)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.norm, made.linear = norm, linear
        made.train(linear.training)
        return made

    def to_pair(self) -> tuple[nn.LayerNorm, nn.Linear]:
        """The LayerNorm and the Linear, with the parameters of this module."""
        return self.norm, self.linear

    def forward(self, x: Tensor) -> Tensor:
        """y [..., O] of x [..., H]."""
        return _apply(x, self.norm, self.linear)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.linear.in_features}, {self.linear.out_features}"


class PassedLayerNorm(nn.LayerNorm):
    """A LayerNorm of a converted model: it keeps its parameters, and leaves the work to the FusedLinear behind it."""

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x


class FusedLinear(nn.Linear):
    """The Linear of a converted model: applies the LayerNorm before it as well, whose parameters stay where they were."""

    _norm: tuple[PassedLayerNorm]

    def forward(self, x: Tensor) -> Tensor:
        """y [..., O] of x [..., H], the input of the LayerNorm."""
        return _apply(x, self._norm[0], self)


def convert(model: nn.Module, pairs: Iterable[tuple[str, str]] | None = None) -> nn.Module:
    """Lets every nn.Linear whose input is the output of an nn.LayerNorm do both; parameters, names and state_dict stay the same.

    Args:
        model: it is changed in place. A model that is itself nn.Sequential, or that torch.fx can trace, is searched for pairs;
            where it cannot be traced, the nn.Sequential in it are.
        pairs: the names of a LayerNorm and a Linear, such as ("ln_2", "mlp.0"), where the caller knows that the output of the
            first goes to the second and nowhere else. None: they are searched for.

    Returns:
        The model.

    Raises:
        ValueError: a name given is no module, or a pair given is none.
    """
    found = _search(model) if pairs is None else list(pairs)
    modules = dict(model.named_modules())
    for norm_name, linear_name in found:
        if missing := [name for name in (norm_name, linear_name) if name not in modules]:
            raise ValueError(f"the model has no module {missing[0]!r}")
        norm, linear = modules[norm_name], modules[linear_name]
        if (reason := why_no_pair(norm, linear)) is not None:
            raise ValueError(f"{norm_name} and {linear_name} cannot be converted: {reason}")
        # Only what they do changes: references to them, optimizers and names stay valid.
        norm.__class__, linear.__class__ = PassedLayerNorm, FusedLinear
        linear._norm = (norm,)  # in a tuple, so that the LayerNorm is no part of the Linear
    return model


def why_no_pair(norm: nn.Module, linear: nn.Module) -> str | None:
    """Why the two are no LayerNorm and Linear that can be one operation; None where they can."""
    if type(norm) is not nn.LayerNorm or type(linear) is not nn.Linear:
        return f"they are {type(norm).__name__} and {type(linear).__name__}, not LayerNorm and Linear"
    if tuple(norm.normalized_shape) != (linear.in_features,):
        return f"the LayerNorm is over {tuple(norm.normalized_shape)}, but the Linear takes {linear.in_features} features"
    if any(hooks for module in (norm, linear) for hooks in (module._forward_hooks, module._forward_pre_hooks,
                                                            module._backward_hooks, module._backward_pre_hooks)):
        return "there are hooks on them"
    return None


def _apply(x: Tensor, norm: nn.LayerNorm, linear: nn.Linear) -> Tensor:
    return layer_norm_linear(x, norm.weight, norm.bias, linear.weight, linear.bias, norm.eps)


def _search(model: nn.Module) -> list[tuple[str, str]]:
    try:
        graph = torch.fx.Tracer().trace(model)
    except _UNTRACEABLE:
        return _in_sequences(model)
    modules = dict(model.named_modules())
    calls = [node for node in graph.nodes if node.op == "call_module"]
    pairs = []
    for node in calls:
        users = list(node.users)
        if len(users) != 1 or users[0].op != "call_module" or users[0].args[:1] != (node,):
            continue
        pair = node.target, users[0].target
        once = all(sum(call.target == name for call in calls) == 1 for name in pair)
        if once and why_no_pair(modules[pair[0]], modules[pair[1]]) is None:
            pairs.append(pair)
    return pairs


def _in_sequences(model: nn.Module) -> list[tuple[str, str]]:
    pairs = []
    for prefix, module in model.named_modules():
        if type(module) is nn.Sequential:
            names = [f"{prefix}.{name}".lstrip(".") for name in module._modules]
            inner = list(module)
            pairs += [(names[i], names[i + 1]) for i in range(len(inner) - 1) if why_no_pair(inner[i], inner[i + 1]) is None]
    return pairs
