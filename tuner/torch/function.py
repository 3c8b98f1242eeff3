"""`layer_norm_linear`, as functions of torch.nn.functional are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tuner.torch import direct, engine, ops
from tuner.torch.plain import plain_forward


class _Eager(torch.autograd.Function):
    """What `lnl::layer_norm_linear` is in a graph, without the dispatcher's share of the time. direct.cpp has the same in C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor,
                linear_bias: Tensor | None, eps: float, cast: Any) -> Tensor:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # or y would be a view, which may not be changed in place
            y, mean, rstd = ops.forward(x, weight, bias, linear_weight, linear_bias, eps, cast)
        ctx.save_for_backward(x, weight, bias, linear_weight, mean, rstd)
        ctx.eps, ctx.cast = eps, cast
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, linear_weight, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:5]
        return ops.spread(ops.backward_again(grad, x, weight, bias, linear_weight, mean, rstd, ctx.eps, ctx.cast, needs), needs)


class _Traced(torch.autograd.Function):
    """What torch.compile sees: a forward pass of operations that it knows, and may fuse with what is beside them, and a backward
    pass that is one operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor,
                linear_bias: Tensor | None, eps: float, cast: Any) -> Tensor:
        y, mean, rstd = plain_forward(x, weight, bias, linear_weight, linear_bias, eps, cast)
        ctx.save_for_backward(x, weight, bias, linear_weight, mean, rstd)
        ctx.eps, ctx.cast = eps, cast
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:5])
        return ops.spread(torch.ops.lnl.layer_norm_linear_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.cast, needs), needs)


def layer_norm_linear(x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor,
                      linear_bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """linear(layer_norm(x, weight, bias, eps), linear_weight, linear_bias), whose backward pass is the tuned kernel.

    The kernel is the best that is known for these sizes on this GPU, else the best predicted one; tuner.torch.autotune finds
    better ones. Tensors that are not on a GPU, of a type other than float32, bfloat16 and float16, of a subclass, or under
    a transform of torch.func or forward-mode differentiation take PyTorch's own path.

    Args:
        x: [..., H].
        weight, bias: scale and shift of the LayerNorm [H]; None: there is none.
        linear_weight: [O, H].
        linear_bias: [O]; None: there is none.
        eps: of the LayerNorm.

    Returns:
        y [..., O].

    Raises:
        RuntimeError: shapes or data types do not go together, as PyTorch says; or a second derivative is asked for.
    """
    if not torch.compiler.is_compiling() and direct.extension is not None:
        served: Tensor | None = direct.extension.layer_norm_linear(x, weight, bias, linear_weight, linear_bias, float(eps))
        if served is not None:
            return served
    if not _is_served(x, weight, bias, linear_weight, linear_bias):
        functional = torch.nn.functional
        return functional.linear(functional.layer_norm(x, x.shape[-1:], weight, bias, eps), linear_weight, linear_bias)
    device = x.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    arguments = (x, weight, bias, linear_weight, linear_bias, float(eps), cast)
    if torch.compiler.is_compiling():
        y = _Traced.apply(*arguments)
    elif torch.is_grad_enabled():
        y = _Eager.apply(*arguments)
    else:
        y, _, _ = ops.forward(*arguments)
    return y


def _is_served(x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, linear_bias: Tensor | None) -> bool:
    if not (engine.serves(x) and engine.serves(linear_weight)):
        return False
    if not (engine.is_plain(weight) and engine.is_plain(bias) and engine.is_plain(linear_bias)):
        return False
    return torch.compiler.is_compiling() or not engine.transformed()
