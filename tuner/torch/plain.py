"""Both passes by PyTorch's own kernels, on any device and in any data type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def plain_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, linear_bias: Tensor | None,
                  eps: float, cast: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As tuner.torch.ops.forward."""
    normal, mean, rstd = _normalise(x, weight, bias, eps, cast)
    y = torch.nn.functional.linear(_to(normal, cast), _to(linear_weight, cast), _to(linear_bias, cast))
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    return y, *(statistic if statistic.dtype == kept else statistic.to(kept) for statistic in (mean, rstd))


def plain_backward(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
                   rstd: Tensor, eps: float, cast: Any, needs: Sequence[bool]) -> list[Tensor]:
    """As tuner.torch.ops.backward: what autograd would do, operation by operation."""
    needs_x, needs_weight, needs_bias, needs_linear_weight, needs_linear_bias = needs
    hidden, rows = x.shape[-1], mean.numel()
    dy, flat = grad.reshape(rows, linear_weight.shape[0]), x.reshape(rows, hidden)
    found: dict[int, Tensor | None] = {}
    if needs_x or needs_weight or needs_bias:
        wide = flat if cast is None else flat.to(torch.float32)
        dn = (dy @ _to(linear_weight, cast)).to(wide.dtype)
        statistics = [statistic.to(_statistics_type(wide)).reshape(rows, 1) for statistic in (mean, rstd)]
        asked = [needs_x, needs_weight and weight is not None, needs_bias and bias is not None]
        found |= enumerate(torch.ops.aten.native_layer_norm_backward(
            dn, wide, [hidden], *statistics, _like(weight, wide, cast), _like(bias, wide, cast), asked))
    if needs_linear_weight:
        normal, _, _ = _normalise(flat, weight, bias, eps, cast)
        found[3] = dy.t() @ _to(normal, cast)
    if needs_linear_bias:
        found[4] = dy.sum(0)
    results = []
    like = (x, weight, bias, linear_weight, linear_weight[:, 0])
    for index, (tensor, needed) in enumerate(zip(like, needs, strict=True)):
        gradient = found.get(index)
        if needed and tensor is not None and gradient is not None:
            results.append(gradient.to(tensor.dtype).reshape(tensor.shape).contiguous())
    return results


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, cast: Any) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm, its means and its 1/deviations; under autocast in float32, as there."""
    wide = x if cast is None else x.to(torch.float32)
    normal, mean, rstd = torch.native_layer_norm(wide, wide.shape[-1:], _like(weight, wide, cast), _like(bias, wide, cast), eps)
    return normal, mean, rstd


def _like(parameter: Tensor | None, wide: Tensor, cast: Any) -> Tensor | None:
    return parameter if parameter is None or cast is None else parameter.to(wide.dtype)


def _to(tensor: Any, cast: Any) -> Any:
    return tensor if tensor is None or cast is None else tensor.to(cast)


def _statistics_type(x: Tensor) -> Any:
    """What PyTorch's LayerNorm keeps its statistics in: float32 for 16-bit data on a GPU, on the CPU the type of x."""
    return x.dtype if x.dtype == torch.float64 or not x.is_cuda else torch.float32
