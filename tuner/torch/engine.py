"""The tuned kernels of this process: chosen once for each problem and row count, compiled once, launched on PyTorch's stream."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from codegen.config import Config
from codegen.dtypes import CLASS_ERRORS, OWN_CLASS
from codegen.errors import CodegenError
from codegen.problem import GRADIENTS, Problem
from codegen.render import Source, render
from tuner.errors import CompileError, LaunchError, NoValidKernel, ToolchainError
from tuner.executors import Executor
from tuner.launcher.driver import Device, open_driver
from tuner.launcher.program import Kernel, Launcher, Replay
from tuner.store import Store
from tuner.toolchain import find_nvcc
from tuner.wisdom.recall import choose

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The data types that kernels know."""

PRECISIONS = {"highest": "fp32", "high": "tf32", "medium": "bf16"}
"""What torch.set_float32_matmul_precision allows float32 products to lose, as an accuracy class."""

REMEMBERED = 1024
"""Calls of different sizes that stay ready; each takes a few hundred bytes."""

_engines: dict[int, Engine] = {}
_opening = threading.Lock()
_watched: dict[Problem, Engine] | None = None


def serves(x: Tensor) -> bool:
    """Whether a tuned kernel may serve a tensor: it is on a GPU and of a type that they know."""
    return x.is_cuda and x.dtype in NAMES


class Engine:
    """The kernels of one device.

    Args:
        device: the device.
        launcher: what launches on it.
        compiled: the machine code of a source. It may raise CompileError and ToolchainError.
    """

    def __init__(self, device: Device, launcher: Launcher, compiled: Callable[[Source], bytes]) -> None:
        self._device = device
        self._launcher = launcher
        self._compiled = compiled
        self._lock = threading.Lock()
        self._kernels: dict[tuple[Problem, Config], Kernel] = {}
        self._ready: dict[tuple[Any, ...], Replay | None] = {}

    @property
    def place(self) -> Executor:
        """The device as tuner.wisdom.recall asks for it: its name, its limits, and that it measures."""
        return cast(Executor, SimpleNamespace(measures=True, device=self._device.name, limits=self._device.limits))

    def forget(self) -> None:
        """Looks again for the best kernel of each call, as after a tuning run. Compiled kernels are kept."""
        with self._lock:
            self._ready.clear()

    def ready(self, key: tuple[Any, ...]) -> Replay | None:
        """The replay for a call, or None where PyTorch's own kernels must do it.

        Args:
            key: hidden, out, the names of the data types of x, of the parameters and of y, which gradients are needed, whether
                results must be reproducible, the accuracy class of float32 products, rows, eps.

        Raises:
            LaunchError: a kernel would have to be loaded while the stream is captured.
        """
        try:
            return self._ready[key]
        except KeyError:
            pass
        with self._lock:
            if key not in self._ready:
                if len(self._ready) >= REMEMBERED:
                    self._ready.pop(next(iter(self._ready)))
                self._ready[key] = self._prepare(key)
            return self._ready[key]

    def _prepare(self, key: tuple[Any, ...]) -> Replay | None:
        *_, rows, eps = key
        try:
            problem = _problem(*key[:-1])
            if _watched is not None:
                _watched[problem] = self
            config = choose(problem, self.place)
            return self._kernel(replace(problem, rows=1), config).at(rows, eps)
        except (CodegenError, CompileError, NoValidKernel, ToolchainError) as error:
            warnings.warn(f"PyTorch's own kernels do the backward pass of layer_norm_linear ({error})", stacklevel=2)
            return None

    def _kernel(self, problem: Problem, config: Config) -> Kernel:
        found = self._kernels.get((problem, config))
        if found is None:
            if is_capturing():
                raise LaunchError("a kernel cannot be loaded while a CUDA graph is captured; run the backward pass once before")
            source = render(problem, config)
            found = self._kernels[problem, config] = Kernel(self._launcher, self._device, source, self._compiled(source))
        return found


def backward(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_weight: Tensor, mean: Tensor,
             rstd: Tensor, eps: float, needs: Sequence[bool]) -> list[Tensor] | None:
    """The gradients that are needed, as tuner.torch.ops.backward; None where PyTorch's own kernels must compute them.

    Enqueued on the current stream of the tensors' device; nothing waits.

    Raises:
        LaunchError: the GPU refused it.
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
    replay = engine(index).ready((hidden, out, dtype, param_dtype, grad.dtype, tuple(needs),
                                  torch.are_deterministic_algorithms_enabled(), precision, rows, eps))
    if replay is None:
        return None
    if grad.dtype != dtype:
        grad = grad.to(dtype)
    read = [tensor if tensor is None else tensor.contiguous() for tensor in (grad, x, weight, bias, linear_weight)]
    like = (*read[1:], None)
    # By now all are contiguous, and empty_like costs half of what torch.empty does.
    written = [torch.empty_like(tensor) if needed and tensor is not None else None
               for tensor, needed in zip(like, needs, strict=True)]
    if needs[4]:
        written[4] = linear_weight.new_empty(out)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*read, *written, mean, rstd)]
    size = replay.workspace_bytes
    workspace = mean.new_empty(size, dtype=torch.uint8) if size else None
    replay(addresses, 0 if workspace is None else workspace.data_ptr(), stream_of(index))
    return [gradient for gradient in written if gradient is not None]


def engine(index: int) -> Engine:
    """The engine of the GPU with that number in PyTorch.

    Raises:
        ToolchainError: there is no driver or no compiler.
        LaunchError: there is no such GPU.
    """
    try:
        return _engines[index]
    except KeyError:
        pass
    with _opening:
        if index not in _engines:
            _engines[index] = _open(index)
        return _engines[index]


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


def forget() -> None:
    """Every engine looks again for the best kernel of each call."""
    for each in _engines.values():
        each.forget()


def _open(index: int) -> Engine:
    device, store = Device(open_driver(), index), Store()
    arch = device.arch

    def compiled(source: Source) -> bytes:
        return find_nvcc(arch).compile(source.text, arch, store).cubin.read_bytes()

    return Engine(device, Launcher(device.driver, store), compiled)


def stream_of(index: int) -> int:
    """The handle of PyTorch's current stream on a GPU."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _problem(hidden: int, out: int, dtype: Any, param_dtype: Any, grad: Any, needs: tuple[bool, ...], deterministic: bool,
             precision: str, rows: int) -> Problem:
    """What is computed. Where y is narrower than x, as under autocast, its class is enough."""
    wants = frozenset(name for name, needed in zip(GRADIENTS, needs, strict=True) if needed)
    classes = [OWN_CLASS[NAMES[dtype]], OWN_CLASS[NAMES[grad]]]
    if dtype == torch.float32:
        classes.append(PRECISIONS[precision])
    accuracy = max(classes, key=CLASS_ERRORS.__getitem__)
    return Problem(rows, hidden, out, NAMES[dtype], wants, deterministic, NAMES[param_dtype], accuracy)
