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
from tuner.errors import CompileError, LaunchError, NoValidKernel, ToolchainError
from tuner.launcher import engine as engines
from tuner.launcher.engine import REMEMBERED, Engine
from tuner.launcher.program import Replay
from tuner.torch import direct
from tuner.torch.enqueue import in_python

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The data types that kernels know."""

PRECISIONS = {"highest": "fp32", "high": "tf32", "medium": "bf16"}
"""What torch.set_float32_matmul_precision allows float32 products to lose, as an accuracy class."""

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_level, _forward_ad = torch._C._functorch.maybe_current_level, torch.autograd.forward_ad
_ready: dict[tuple[Any, ...], Replay | None] = {}
_watched: dict[Problem, Engine] | None = None


def serves(x: Tensor) -> bool:
    """Whether a tuned kernel may serve a tensor: it is on a GPU, of a type that they know, and `is_plain`."""
    return x.is_cuda and x.dtype in NAMES and type(x) in _PLAIN


def is_plain(tensor: Tensor | None) -> bool:
    """Whether a tensor has memory of its own, which subclasses such as distributed tensors may lack; or is absent."""
    return tensor is None or type(tensor) in _PLAIN


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work, whose tensors have no memory of their own."""
    return _level() is not None or _forward_ad._current_level >= 0


def backward(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
             rstd: Tensor, eps: float, needs: Sequence[bool]) -> list[Tensor] | None:
    """The gradients that are needed, as tuner.torch.ops.backward; None where PyTorch's own kernels must compute them.

    Enqueued on the current stream of the tensors' device; nothing waits.

    Raises:
        LaunchError: the GPU refused it, or a kernel would have to be loaded while the stream is captured.
    """
    if not serves(x) or type(grad) not in _PLAIN or transformed():
        return None
    needs, extension = tuple(needs), direct.extension
    given = (grad, x, weight, bias, linear_weight, mean, rstd)
    if extension is not None:
        found: list[Tensor] | None = extension.backward(*given, eps, needs)
        if found is not None:
            return found
    out, hidden = linear_weight.shape
    dtype, index = x.dtype, x.get_device()
    # Whatever the kernel depends on; what it asks of these is looked at once, when the key is new.
    key = (index, hidden, out, dtype, linear_weight.dtype, grad.dtype, None if weight is None else weight.dtype,
           None if bias is None else bias.dtype, needs, torch.are_deterministic_algorithms_enabled(),
           float32_precision() if dtype == torch.float32 else "highest", mean.numel(), eps)
    try:
        replay = _ready[key]
    except KeyError:
        replay = _prepare(key)
    if replay is None:
        return None
    if extension is not None:
        extension.learn(*given, eps, needs, replay)
    return in_python(replay, stream_of(index), *given, needs)


def forget() -> None:
    """Looks again for the best kernel of each call, as after a tuning run. Loaded kernels are kept."""
    engines.forget()
    _ready.clear()
    direct.forget()


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


def float32_precision() -> str:
    """What float32 products may lose, in the words of torch.set_float32_matmul_precision. Once the precision has been set for
    CUDA alone, as newer versions of PyTorch advise, they refuse the old question."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def problem_of(key: tuple[Any, ...]) -> Problem | None:
    """What a call computes; None where no kernel knows its data types. Where y is narrower than x, as under autocast, its class
    is enough."""
    _, hidden, out, dtype, param_dtype, grad, weight, bias, needs, deterministic, precision, rows, _ = key
    if rows == 0 or dtype not in NAMES or param_dtype not in (dtype, torch.float32):
        return None
    if weight not in (None, param_dtype) or bias not in (None, param_dtype) or (grad != dtype and dtype != torch.float32):
        return None
    wants = frozenset(name for name, needed in zip(GRADIENTS, needs, strict=True) if needed)
    classes = [OWN_CLASS[NAMES[dtype]], OWN_CLASS[NAMES[grad]]]
    if dtype == torch.float32:
        classes.append(PRECISIONS[precision])
    accuracy = max(classes, key=CLASS_ERRORS.__getitem__)
    return Problem(rows, hidden, out, NAMES[dtype], wants, deterministic, NAMES[param_dtype], accuracy)


def _prepare(key: tuple[Any, ...]) -> Replay | None:
    problem = problem_of(key)
    replay = None if problem is None else _find(problem, key[0], key[-1])
    if replay is not None:
        direct.start()
    if len(_ready) >= REMEMBERED:
        _ready.clear()
    _ready[key] = replay
    return replay


def _find(problem: Problem, index: int, eps: float) -> Replay | None:
    try:
        engine = engines.engine(index)
        if _watched is not None:
            _watched[problem] = engine
        return engine.ready(problem, eps, may_load=_may_load)
    except (CodegenError, CompileError, LaunchError, NoValidKernel, ToolchainError) as error:
        if isinstance(error, LaunchError) and not _may_load():
            raise  # a captured graph would keep PyTorch's kernels for good
        warnings.warn(f"PyTorch's own kernels do the backward pass of layer_norm_linear ({error})", stacklevel=2)
    return None


def _may_load() -> bool:
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
