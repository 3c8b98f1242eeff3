"""A call of the launcher from PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tuner.launcher.program import Replay


def in_python(replay: Replay, stream: int, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None,
              linear_weight: Tensor, mean: Tensor, rstd: Tensor, needs: Sequence[bool]) -> list[Tensor] | None:
    """Makes the gradients that are needed and enqueues what computes them.

    Args:
        replay: what to call.
        stream: the handle of the stream.
        grad: of y, of any strides and perhaps another data type than x.
        x, weight, bias, linear_weight, mean, rstd, needs: as tuner.torch.ops.backward.

    Returns:
        The gradients; None where a tensor has no memory of its own.

    Raises:
        LaunchError: the GPU refused it.
    """
    grad, x, linear_weight, mean, rstd = (_in_order(tensor) for tensor in (grad.to(x.dtype), x, linear_weight, mean, rstd))
    weight, bias = (None if tensor is None else _in_order(tensor) for tensor in (weight, bias))
    try:
        given = (grad.data_ptr(), x.data_ptr(), 0 if weight is None else weight.data_ptr(),
                 0 if bias is None else bias.data_ptr(), linear_weight.data_ptr())
    except RuntimeError:  # a batch of gradients for one call, as autograd makes for is_grads_batched
        return None
    if not (given[0] and given[1] and given[4] and (weight is None or given[2]) and (bias is None or given[3])):
        return None  # some other tensor without memory of its own
    written, results = [0, 0, 0, 0, 0], []
    for place, tensor in enumerate((x, weight, bias, linear_weight)):
        if needs[place] and tensor is not None:
            gradient = torch.empty_like(tensor)  # all are contiguous
            written[place] = gradient.data_ptr()
            results.append(gradient)
    if needs[4]:
        gradient = linear_weight.new_empty(linear_weight.shape[0])
        written[4] = gradient.data_ptr()
        results.append(gradient)
    size, scratch = replay.workspace_bytes, 0
    if size:
        workspace = mean.new_empty(size, dtype=torch.uint8)
        scratch = workspace.data_ptr()
    replay((*given, *written, mean.data_ptr(), rstd.data_ptr()), scratch, stream)
    return results


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor as memory that can be read as it is: C-contiguous, and no view that stands for the negative of its memory."""
    return tensor.resolve_neg().contiguous()
