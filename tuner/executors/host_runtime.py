"""The loaded runtime of cuda_on_host: memory between fences, and launches. The C side is cuda_on_host/launch.cpp."""

from __future__ import annotations

import _ctypes
import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from codegen.tensors import BY_NAME
from tuner.dtypes import FLOAT32, POISON, DType, as_bytes
from tuner.errors import CompileError, LaunchError, OutOfMemory

Layout = Literal["end", "begin", "shifted"]
_LAYOUTS = {"end": 0, "begin": 1, "shifted": 1}
_ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2}
_MESSAGE_BYTES = 1024
_POISON = np.array([POISON], np.uint32).view(np.uint8)


class _LaunchRequest(ctypes.Structure):
    """struct LaunchRequest of launch.cpp."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("grid", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
        ("max_threads", ctypes.c_int64),
        ("max_shared_bytes", ctypes.c_int64),
        ("cluster", ctypes.c_int64),
        ("overlaps", ctypes.c_int),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("memory", ctypes.c_void_p),
    ]


class Runtime:
    """The runtime's library in this process. Its functions release the interpreter lock, and may run in several threads."""

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        self.launch = functions.cuda_on_host_launch
        self.launch.argtypes = [ctypes.POINTER(_LaunchRequest), ctypes.c_char_p, ctypes.c_size_t]
        self.memory_new = functions.cuda_on_host_memory_new
        self.memory_new.argtypes = [ctypes.c_int]
        self.memory_new.restype = ctypes.c_void_p
        self.memory_free = functions.cuda_on_host_memory_free
        self.memory_free.argtypes = [ctypes.c_void_p]
        self.memory_free.restype = None
        self.memory_add = functions.cuda_on_host_memory_place
        self.memory_add.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p,
                                    ctypes.c_char_p, ctypes.c_size_t]
        self.memory_add.restype = ctypes.c_void_p
        self.has_fma = bool(functions.cuda_on_host_has_fma())


_loaded: dict[str, Runtime] = {}


def load_runtime(digest: str, library: Path) -> Runtime:
    """The runtime of that digest, out of whatever store it was loaded first in this process. Kernels find it by its name, so of
    two copies the second would never see what is run."""
    if digest not in _loaded:
        _loaded[digest] = Runtime(library)
    return _loaded[digest]


class Memory:
    """The tensors of one call, each between fences; a context manager that gives them back at its end.

    Args:
        layout: "end": every buffer ends directly before a fence. "begin": it begins directly after one. A base address is a
            multiple of the element's size only, in "end", unless the buffer's size is a multiple of more. "shifted": as "begin",
            but tensors of the caller begin one element later, so that no address is a multiple of more than its size; messages
            count that element.
    """

    def __init__(self, runtime: Runtime, layout: Layout = "end") -> None:
        self._runtime = runtime
        self._shifted = layout == "shifted"
        self.handle: int | None = runtime.memory_new(_LAYOUTS[layout])
        self.addresses: dict[str, int] = {}
        self._views: dict[str, NDArray[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._views.clear()
        self._runtime.memory_free(self.handle)
        self.handle = None

    def add_input(self, name: str, array: NDArray[Any]) -> int:
        """The address of a copy that kernels can read only.

        Raises:
            OutOfMemory: there is not enough memory.
        """
        return self._add(name, array.shape, array.dtype, np.ascontiguousarray(array))

    def add_output(self, name: str, shape: tuple[int, ...], dtype: DType = FLOAT32) -> int:
        """The address of a buffer filled with NaN (see tuner.dtypes.POISON).

        Raises:
            OutOfMemory: there is not enough memory.
        """
        return self._add(name, shape, dtype, None)

    def _add(self, name: str, shape: tuple[int, ...], dtype: DType, source: NDArray[Any] | None) -> int:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        size = math.prod(shape) * dtype.itemsize
        before = dtype.itemsize if self._shifted and name in BY_NAME else 0
        if before and source is not None:
            source = np.concatenate([_POISON[:before], as_bytes(source)])
        pointer = None if source is None else source.ctypes.data
        address: int | None = self._runtime.memory_add(
            self.handle, name.encode(), before + size, dtype.itemsize, pointer, message, _MESSAGE_BYTES)
        if address is None:
            raise OutOfMemory(message.value.decode())
        address += before
        self.addresses[name] = address
        held = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self._views[name] = held.view(dtype).reshape(shape)
        return address

    def fill(self, name: str, value: float) -> None:
        """Sets every element of an output; NaN stands for POISON, in buffers of whole numbers too."""
        view = self._views[name]
        if math.isnan(value):
            held = as_bytes(view)
            whole = held.size // _POISON.size * _POISON.size
            held[:whole].view(np.uint32).fill(POISON)
            held[whole:] = _POISON[:held.size - whole]
        else:
            view.fill(value)

    def read(self, name: str) -> NDArray[Any]:
        """A copy of a buffer's contents."""
        return self._views[name].copy()


class Kernels:
    """The kernels of one compiled source.

    Args:
        library: what build_kernels made; the runtime must be loaded.
        max_threads: most threads in a block.
        max_shared_bytes: most dynamic shared memory of a block.

    Raises:
        CompileError: the library cannot be loaded.
    """

    def __init__(self, runtime: Runtime, library: Path, *, max_threads: int, max_shared_bytes: int) -> None:
        self._runtime = runtime
        self._max_threads = max_threads
        self._max_shared_bytes = max_shared_bytes
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise CompileError(f"a compiled kernel cannot be loaded: {error}") from error
        self.params_bytes: int = ctypes.c_size_t.in_dll(self._library, "params_bytes").value

    def __del__(self) -> None:
        library = getattr(self, "_library", None)
        if library is not None:  # ctypes never closes what it opened, and a run opens hundreds
            _ctypes.dlclose(library._handle)

    def _cluster(self, kernel: str) -> int:
        """Blocks of a cluster, as the kernel declares them; 1 where it declares none."""
        try:
            return ctypes.c_int.in_dll(self._library, f"cluster_of_{kernel}").value
        except ValueError:
            return 1

    def memory(self, layout: Layout = "end") -> Memory:
        """Fresh memory for one call."""
        return Memory(self._runtime, layout)

    def launch(self, kernel: str, *, grid: int, block: int, params: bytes, memory: Memory, shared_bytes: int = 0,
               overlaps: bool = False, order: str = "forward") -> None:
        """Runs one kernel to its end.

        Args:
            kernel: its name.
            grid: blocks; block: threads of each; both have one dimension.
            params: the bytes of the source's `struct Params`.
            memory: every buffer the kernel may touch.
            shared_bytes: dynamic shared memory of a block, filled with NaN before each.
            overlaps: as Launch.overlaps; the kernel finds all buffers but the inputs out of reach until it waits.
            order: in which blocks and threads get their turn: "forward", "reverse" or "shuffled:<seed>".

        Raises:
            LaunchError: the sizes are out of the device's limits, or the kernel broke a law of cuda_on_host; the message names
                the kernel, and the block and thread where one is to blame.
            ValueError: `order` is none of the above, or `params` has another size than the struct.
        """
        if len(params) != self.params_bytes:
            raise ValueError(f"params has {len(params)} bytes, but struct Params of the source has {self.params_bytes}")
        kind, seed = _parse_order(order)
        entry: Callable[..., object] = self._library[f"run_{kernel}"]
        request = _LaunchRequest(
            kernel.encode(), ctypes.cast(entry, ctypes.c_void_p), ctypes.cast(params, ctypes.c_void_p), grid, block, shared_bytes,  # type: ignore[arg-type]
            self._max_threads, self._max_shared_bytes, self._cluster(kernel), overlaps, kind, seed, memory.handle)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self._runtime.launch(ctypes.byref(request), message, _MESSAGE_BYTES) != 0:
            raise LaunchError(message.value.decode())


def _parse_order(order: str) -> tuple[int, int]:
    kind, _, seed = order.partition(":")
    if kind not in _ORDERS or (kind == "shuffled") != seed.isdecimal():
        raise ValueError(f"order must be forward, reverse or shuffled:<seed>, not {order!r}")
    return _ORDERS[kind], int(seed or 0)
