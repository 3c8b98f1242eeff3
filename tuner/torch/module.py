"""LayerNormLinear, a module, and the classes that a LayerNorm and a Linear of a converted model take."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn

from tuner.torch.function import layer_norm_linear


class LayerNormLinear(nn.Module):
    """Linear(LayerNorm(x)) with the tuned backward pass.

    Its parameters are those of `norm`, an nn.LayerNorm, and `linear`, an nn.Linear, which also initialise them, so that the keys
    of its state are norm.weight, norm.bias, linear.weight and linear.bias. Where one of the two was replaced, or has hooks, as
    pruning adds them, both are called as they are.

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
        if torch.jit.is_scripting():
            return self.linear(self.norm(x))
        else:  # which TorchScript leaves out
            norm, linear = self.norm, self.linear
            if type(norm) is nn.LayerNorm and type(linear) is nn.Linear and is_bare(norm) and is_bare(linear):
                return _apply(x, norm, linear)
            return linear(norm(x))

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.linear.in_features}, {self.linear.out_features}"


class PassedLayerNorm(nn.LayerNorm):
    """A LayerNorm of a converted model: it keeps its parameters, and leaves the work to the FusedLinear behind it, as long as
    their Pair holds."""

    def forward(self, input: Tensor) -> Tensor:
        """The input itself; where the pair does not hold, the LayerNorm of it."""
        if torch.jit.is_scripting():
            return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        else:  # which TorchScript leaves out
            return input if self._pair.norm_for(self) is self else super().forward(input)


class FusedLinear(nn.Linear):
    """The Linear of a converted model: applies the LayerNorm before it as well, whose parameters stay where they were, as long
    as their Pair holds."""

    def forward(self, input: Tensor) -> Tensor:
        """y [..., O] of the input of the LayerNorm [..., H]; where the pair does not hold, of that of this module."""
        if torch.jit.is_scripting():
            return nn.functional.linear(input, self.weight, self.bias)
        else:  # which TorchScript leaves out
            norm = self._pair.norm_for(self)
            return super().forward(input) if norm is None else _apply(input, norm, self)


class Pair:
    """A LayerNorm and a Linear of a converted model, and where they stand in it.

    It holds while both stand there and are bare. Once one of them is replaced, wrapped, hooked or copied without the other, both
    are what they were before. The modules are held weakly, so that a copy of one of them does not keep a copy of the other.

    Args:
        norm, linear: of the pair.
        norm_place, linear_place: the module of which each is a child, and its name there.
    """

    def __init__(self, norm: PassedLayerNorm, norm_place: tuple[nn.Module, str], linear: FusedLinear,
                 linear_place: tuple[nn.Module, str]) -> None:
        self.__setstate__((norm, *norm_place, linear, *linear_place))

    def __getstate__(self) -> tuple[Any, ...]:
        """The modules themselves, which pickle and copy.deepcopy carry over."""
        return (self._norm(), self._norm_parent(), self._norm_name, self._linear(), self._linear_parent(), self._linear_name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        norm, norm_parent, self._norm_name, linear, linear_parent, self._linear_name = state
        self._norm, self._norm_parent, self._linear, self._linear_parent = (
            weakref.ref(module) if module is not None else _gone for module in (norm, norm_parent, linear, linear_parent))

    def norm_for(self, module: nn.Module) -> Any:
        """The LayerNorm, asked for by one of the two; None where the pair does not hold, or the one who asks is a copy."""
        norm, linear, norm_parent, linear_parent = self._norm(), self._linear(), self._norm_parent(), self._linear_parent()
        if module is not norm and module is not linear:
            return None
        if norm is None or linear is None or norm_parent is None or linear_parent is None:
            return None
        if norm_parent._modules.get(self._norm_name) is not norm or linear_parent._modules.get(self._linear_name) is not linear:
            return None
        if type(norm) is PassedLayerNorm and type(linear) is FusedLinear and is_bare(norm) and is_bare(linear):
            return norm
        return None


def why_no_pair(norm: nn.Module, linear: nn.Module) -> str | None:
    """Why the two are no LayerNorm and Linear that can be one operation; None where they can."""
    if type(norm) is not nn.LayerNorm or type(linear) is not nn.Linear:
        return f"they are {type(norm).__name__} and {type(linear).__name__}, not LayerNorm and Linear"
    if tuple(norm.normalized_shape) != (linear.in_features,):
        return f"the LayerNorm is over {tuple(norm.normalized_shape)}, but the Linear takes {linear.in_features} features"
    if not (is_bare(norm) and is_bare(linear)):
        return "there are hooks on them, or one has a forward of its own"
    return None


def is_bare(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
                or "forward" in module.__dict__)


def _apply(x: Tensor, norm: nn.LayerNorm, linear: nn.Linear) -> Tensor:
    return layer_norm_linear(x, norm.weight, norm.bias, linear.weight, linear.bias, norm.eps)


def _gone() -> None:
    """A weak reference to what is gone."""
