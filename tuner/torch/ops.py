"""The operations as PyTorch's dispatcher knows them: `lnl::layer_norm_linear` and its backward pass.

torch.compile keeps the second in its graphs, and autograd is registered for the first. Forward is by PyTorch's own kernels, which
give the mean and 1/deviation of each row; backward is by the tuned kernel on a GPU (tuner/torch/engine.py), by PyTorch's own
elsewhere and where no kernel computes what is asked for. Both are in C++ as well (direct.cpp), which takes their place on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from codegen.problem import GRADIENTS
from tuner.torch import engine
from tuner.torch.plain import plain_backward, plain_forward

NAMESPACE = "lnl"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "layer_norm_linear(Tensor x, Tensor? weight, Tensor? bias, Tensor linear_weight, Tensor? linear_bias, float eps, "
    "ScalarType? cast) -> (Tensor, Tensor, Tensor)")
_library.define(
    "layer_norm_linear_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor linear_weight, Tensor mean, "
    "Tensor rstd, float eps, ScalarType? cast, bool[] needs) -> Tensor[]")


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, linear_bias: Tensor | None, eps: float,
            cast: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., O], and of each row of x its mean and 1/sqrt(variance + eps) [..., 1].

    Args:
        x: [..., H].
        weight, bias: of the LayerNorm [H].
        linear_weight: [O, H].
        linear_bias: [O].
        eps: of the LayerNorm.
        cast: the data type of the product under autocast, where statistics are kept in float32; None: all have one type.
    """
    with _without_autocast(x):
        return plain_forward(x, weight, bias, linear_weight, linear_bias, eps, cast)


def backward(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
             rstd: Tensor, eps: float, cast: Any, needs: Sequence[bool]) -> list[Tensor]:
    """The gradients of x, weight, bias, linear_weight and linear_bias that are needed, in this order and no others.

    Args:
        grad: of y, [..., O], of any strides.
        mean, rstd: what `forward` gave.
        needs: which of the five are wanted.

    Raises:
        RuntimeError: the tensors do not go together, in size, in type or in their device.
    """
    _check(grad, x, weight, bias, linear_weight, mean, rstd, needs)
    if not any(needs):
        return []
    found = engine.backward(grad, x, weight, bias, linear_weight, mean, rstd, eps, needs)
    if found is not None:
        return found
    with _without_autocast(x):
        return plain_backward(grad, x, weight, bias, linear_weight, mean, rstd, eps, cast, needs)


def _check(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
           rstd: Tensor, needs: Sequence[bool]) -> None:
    """What kernels take for granted. go_together of known.h asks the same of each call that does not come here."""
    if len(needs) != len(GRADIENTS):
        raise RuntimeError(f"layer_norm_linear_backward: `needs` says for each of {len(GRADIENTS)} gradients whether it is "
                           f"wanted, not for {len(needs)}")
    device, kept = x.device, torch.float64 if x.dtype == torch.float64 else torch.float32
    if linear_weight.dim() == 2 and x.dim() > 0:
        out, hidden = linear_weight.shape
        if (x.shape[-1] == hidden and grad.shape == (*x.shape[:-1], out) and grad.device == linear_weight.device == device
                and all(one is None or (one.shape == (hidden,) and one.device == device) for one in (weight, bias))
                and all(one.numel() * hidden == x.numel() and one.dtype == kept and one.device == device
                        for one in (mean, rstd))):
            return
    given = {"grad": grad, "x": x, "weight": weight, "bias": bias, "linear_weight": linear_weight, "mean": mean, "rstd": rstd}
    found = ", ".join(f"{name} {list(one.shape)} {one.dtype} {one.device}" for name, one in given.items() if one is not None)
    raise RuntimeError("layer_norm_linear_backward: the tensors must be on one device, grad [..., O], x [..., H], weight and "
                       f"bias [H], linear_weight [O, H], mean and rstd {kept} and one for each row; they are {found}")


def backward_again(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
                   rstd: Tensor, eps: float, cast: Any, needs: Sequence[bool]) -> list[Tensor]:
    """As `backward`, but where gradients are to be differentiated, by the operation, whose derivative raises."""
    if torch.is_grad_enabled():
        return list(torch.ops.lnl.layer_norm_linear_backward(
            grad, x, weight, bias, linear_weight, mean, rstd, eps, cast, list(needs)))
    return backward(grad, x, weight, bias, linear_weight, mean, rstd, eps, cast, needs)


def _without_autocast(x: Tensor) -> Any:
    """What autocast would do is in `cast`, and compiled graphs run without it."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _fake_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, linear_bias: Tensor | None,
                  eps: float, cast: Any) -> tuple[Tensor, Tensor, Tensor]:
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.new_empty((*x.shape[:-1], linear_weight.shape[0]), dtype=x.dtype if cast is None else cast)
    return y, *(x.new_empty((*x.shape[:-1], 1), dtype=kept) for _ in range(2))


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
                   rstd: Tensor, eps: float, cast: Any, needs: Sequence[bool]) -> list[Tensor]:
    inputs = (x, weight, bias, linear_weight, linear_weight[:, 0])
    return [tensor.new_empty(tensor.shape) for tensor, needed in zip(inputs, needs, strict=True) if needed and tensor is not None]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keeps what the backward pass reads."""
    x, weight, bias, linear_weight, _, eps, cast = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, linear_weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.eps, ctx.cast = eps, cast


def spread(gradients: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """One for each argument of the operation, None where none is needed."""
    left = iter(gradients)
    return (*(next(left) if needed else None for needed in needs), None, None)


def _differentiate(context: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    needs = list(context.needs_input_grad[:5])
    found = torch.ops.lnl.layer_norm_linear_backward(grad, *context.saved_tensors, context.eps, context.cast, needs)
    return spread(found, needs)


def _differentiate_twice(context: Any, *_: Any) -> NoReturn:
    raise RuntimeError("layer_norm_linear has no second derivative; where you need it, use layer_norm and linear of "
                       "torch.nn.functional")


def _register() -> None:
    for name, implementation, fake in (("layer_norm_linear", forward, _fake_forward),
                                       ("layer_norm_linear_backward", backward, _fake_backward)):
        _library.impl(name, implementation, "CompositeExplicitAutograd")  # to which a GPU's own (direct.cpp) is preferred
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::layer_norm_linear", _differentiate, setup_context=_set_up, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::layer_norm_linear_backward", _differentiate_twice, lib=_library)


_register()
