"""From PyTorch's tensors to a launch on its current stream, with as little work in each call as may be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from codegen.dtypes import CLASS_ERRORS, OWN_CLASS
from codegen.errors import CodegenError
from codegen.problem import GRADIENTS, Problem
from tuner.errors import CompileError, NoValidKernel, ToolchainError
from tuner.launcher import engine as engines
from tuner.launcher.engine import REMEMBERED, Engine
from tuner.launcher.program import Replay

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The data types that kernels know."""

PRECISIONS = {"highest": "fp32", "high": "tf32", "medium": "bf16"}
"""What torch.set_float32_matmul_precision allows float32 products to lose, as an accuracy class."""

_ready: dict[tuple[Any, ...], Replay | None] = {}
_watched: dict[Problem, Engine] | None = None


def serves(x: Tensor) -> bool:
    """Whether a tuned kernel may serve a tensor: it is on a GPU, of a type that they know, and has memory of its own, which
    subclasses such as distributed tensors may lack."""
    return x.is_cuda and x.dtype in NAMES and type(x) in (Tensor, torch.nn.Parameter)


def backward(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
             rstd: Tensor, eps: float, needs: Sequence[bool]) -> list[Tensor] | None:
    """The gradients that are needed, as tuner.torch.ops.backward; None where PyTorch's own kernels must compute them.

    Enqueued on the current stream of the tensors' device; nothing waits.

    Raises:
        LaunchError: the GPU refused it, or a kernel would have to be loaded while the stream is captured.
    """
    out, hidden = linear_weight.shape
    rows, dtype, param_dtype = mean.numel(), x.dtype, linear_weight.dtype
    if rows == 0 or dtype not in NAMES or param_dtype not in (dtype, torch.float32):
        return None
    if any(parameter is not None and parameter.dtype != param_dtype for parameter in (weight, bias)):
        return None
    if grad.dtype != dtype and dtype != torch.float32:
        return None
    index = x.get_device()
    precision = torch.get_float32_matmul_precision() if dtype == torch.float32 else "highest"
    key = (index, hidden, out, dtype, param_dtype, grad.dtype, tuple(needs), torch.are_deterministic_algorithms_enabled(),
           precision, rows, eps)
    try:
        replay = _ready[key]
    except KeyError:
        replay = _prepare(key)
    if replay is None:
        return None
    if grad.dtype != dtype:
        grad = grad.to(dtype)
    read = [tensor if tensor is None else tensor.contiguous() for tensor in (grad, x, weight, bias, linear_weight)]
    # By now all are contiguous, and empty_like costs half of what torch.empty does.
    written = [torch.empty_like(tensor) if needed and tensor is not None else None
               for tensor, needed in zip((*read[1:], None), needs, strict=True)]
    if needs[4]:
        written[4] = linear_weight.new_empty(out)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*read, *written, mean, rstd)]
    size = replay.workspace_bytes
    workspace = mean.new_empty(size, dtype=torch.uint8) if size else None
    replay(addresses, 0 if workspace is None else workspace.data_ptr(), stream_of(index))
    return [gradient for gradient in written if gradient is not None]


def forget() -> None:
    """Looks again for the best kernel of each call, as after a tuning run. Loaded kernels are kept."""
    engines.forget()
    _ready.clear()


@contextmanager
def watched() -> Iterator[dict[Problem, Engine]]:
    """What is computed in the block, each with its row count, and on which device; whether it was ready or not."""
    global _watched
    forget()
    _watched = found = dict[Problem, Engine]()
    try:
        yield found
    finally:
        _watched = None


def stream_of(index: int) -> int:
    """The handle of PyTorch's current stream on a GPU."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def problem_of(key: tuple[Any, ...]) -> Problem:
    """What a call computes. Where y is narrower than x, as under autocast, its class is enough."""
    _, hidden, out, dtype, param_dtype, grad, needs, deterministic, precision, rows, _ = key
    wants = frozenset(name for name, needed in zip(GRADIENTS, needs, strict=True) if needed)
    classes = [OWN_CLASS[NAMES[dtype]], OWN_CLASS[NAMES[grad]]]
    if dtype == torch.float32:
        classes.append(PRECISIONS[precision])
    accuracy = max(classes, key=CLASS_ERRORS.__getitem__)
    return Problem(rows, hidden, out, NAMES[dtype], wants, deterministic, NAMES[param_dtype], accuracy)


def _prepare(key: tuple[Any, ...]) -> Replay | None:
    replay = None
    try:
        problem, engine = problem_of(key), engines.engine(key[0])
        if _watched is not None:
            _watched[problem] = engine
        replay = engine.ready(problem, key[-1], may_load=_may_load)
    except (CodegenError, CompileError, NoValidKernel, ToolchainError) as error:
        warnings.warn(f"PyTorch's own kernels do the backward pass of layer_norm_linear ({error})", stacklevel=2)
    if len(_ready) >= REMEMBERED:
        _ready.clear()
    _ready[key] = replay
    return replay


def _may_load() -> bool:
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
