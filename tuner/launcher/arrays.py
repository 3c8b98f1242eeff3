"""Arrays of other libraries that lie on a GPU, by __cuda_array_interface__ or DLPack: where they are, never a copy."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from codegen.dtypes import ITEMSIZE
from tuner.errors import InputError, InputTypeError
from tuner.launcher.driver import open_driver

ON_CUDA = (2, 13)  # kDLCUDA and kDLCUDAManaged, of dlpack.h

LEGACY_STREAM = 1
"""The default stream of CUDA's runtime, as DLPack and __cuda_array_interface__ write it."""

_BY_TYPESTR = {"<f4": "float32", "<f2": "float16"}
_BY_CODE = {(2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16", (1, 8): "uint8"}  # dlpack.h


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("offset", ctypes.c_uint64)]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """One array.

    Attributes:
        address: of its first element.
        shape: its shape.
        dtype: the name of its data type (codegen.dtypes), or what the library calls it where it is none of them.
        contiguous: whether it is C-contiguous.
        writable: whether it may be written.
        producer: the stream on which it is made, where it says one: 1 for the legacy default stream.
        owner: keeps its memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    contiguous: bool
    writable: bool
    producer: int | None
    owner: object

    @property
    def nbytes(self) -> int:
        """Its size in bytes; that of a data type that is not known is 1 an element."""
        size = ITEMSIZE.get(self.dtype, 1)
        for extent in self.shape:
            size *= extent
        return size


def is_on_device(array: object) -> bool:
    """Whether an array lies on a GPU and says where."""
    if hasattr(type(array), "__dlpack_device__"):
        return bool(array.__dlpack_device__()[0] in ON_CUDA)  # type: ignore[attr-defined]
    return hasattr(array, "__cuda_array_interface__")


def device_of(array: Any) -> int:
    """The number of the GPU an array lies on; the driver knows where its library does not say."""
    if hasattr(type(array), "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    address = int(array.__cuda_array_interface__["data"][0] or 0)
    return open_driver().device_of(address) if address else 0


def on_device(name: str, array: Any, stream: int) -> OnDevice:
    """Where an array is.

    Args:
        name: of the argument, for errors.
        array: a tensor of PyTorch, an object with DLPack's methods, which orders its memory before the stream, or one with
            __cuda_array_interface__.
        stream: the handle of the stream that will use it.

    Raises:
        InputTypeError: it is on no GPU, or has no memory of its own.
    """
    if not is_on_device(array):
        raise InputTypeError(f"{name} must lie on the GPU like x, with __dlpack__ or __cuda_array_interface__; "
                             f"{type(array).__name__} does not")
    if _library(array) == "torch":
        return _of_torch(name, array)
    if hasattr(type(array), "__dlpack__"):
        return _by_dlpack(array, stream)
    return _by_interface(array)


def _by_interface(array: Any) -> OnDevice:
    """CUDA Array Interface, version 2 and 3 (numba's documentation specifies it)."""
    said: Mapping[str, Any] = array.__cuda_array_interface__
    address, read_only = said["data"]
    shape = tuple(int(extent) for extent in said["shape"])
    dtype = _BY_TYPESTR.get(said["typestr"], str(said["typestr"]))
    strides = said.get("strides")
    size = ITEMSIZE.get(dtype, 1)
    contiguous = strides is None or _is_contiguous(shape, [stride // size for stride in strides])
    stream = said.get("stream")
    return OnDevice(int(address or 0), shape, dtype, contiguous, not read_only, None if stream is None else int(stream), array)


def _of_torch(name: str, array: Any) -> OnDevice:
    """PyTorch's DLPack refuses tensors off the current GPU, so that what it would say is read from the tensor. Its producer is
    PyTorch's current stream on the tensor's GPU."""
    try:
        address = array.data_ptr()
    except RuntimeError:  # sparse tensors, for one
        address = 0
    if address == 0 and array.numel() > 0:
        raise InputTypeError(f"{name} is a tensor without memory of its own, of the class {type(array).__name__}; give the "
                             "tensor that it stands for")
    return OnDevice(address, tuple(array.shape), str(array.dtype).removeprefix("torch."), array.is_contiguous(), True,
                    _current_stream(array) or LEGACY_STREAM, array)


def _by_dlpack(array: Any, stream: int) -> OnDevice:
    """The capsule is only looked into; its own destructor gives the tensor back when it is dropped."""
    capsule = array.__dlpack__(stream=stream or LEGACY_STREAM)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(get(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = [tensor.strides[i] for i in range(tensor.ndim)] if tensor.strides else None
    dtype = _BY_CODE.get((tensor.code, tensor.bits), f"DLPack type {tensor.code} of {tensor.bits} bits")
    return OnDevice(int(tensor.data or 0) + tensor.offset, shape, dtype, strides is None or _is_contiguous(shape, strides), True,
                    None, (array, capsule))


def _is_contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    """Strides in elements."""
    if 0 in shape:
        return True
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def empty_like(array: Any, shape: tuple[int, ...], dtype: str, stream: int) -> Any:
    """A new array on the same GPU by the library that made `array`, its contents undefined, for use on a stream: libraries give
    memory that is dropped to whatever comes next on the stream for which it was made.

    Raises:
        InputError: that library is none of those known here.
    """
    library = _library(array)
    if library == "torch":
        with _current(array, stream):
            return array.new_empty(shape, dtype=getattr(importlib.import_module("torch"), dtype))
    if library == "cupy":
        with _current(array, stream):
            return importlib.import_module("cupy").empty(shape, dtype)
    if library == "pycuda":
        numpy = importlib.import_module("numpy")
        return importlib.import_module("pycuda.gpuarray").empty(shape, numpy.dtype(dtype))
    raise InputError(f"there is no way known to make new arrays of {library}; give them in out, and scratch memory in workspace")


def add_into(target: Any, found: Any, stream: int) -> None:
    """Enqueues target += found on a stream, by the library that made both.

    Raises:
        InputError: that library is none of those known here.
    """
    library = _library(target)
    if library == "torch":
        with _current(target, stream):
            target.detach().add_(found)
    elif library == "cupy":
        with _current(target, stream):
            target += found
    else:
        raise InputError(f"there is no way known to add to arrays of {library}, and this kernel does not; leave accumulate "
                         "out, or give a config with reduction=atomic")


def _library(array: object) -> str:
    """Who made an array: one of those known here, of which its class may be derived; else the library of its class."""
    libraries = [kind.__module__.partition(".")[0] for kind in type(array).__mro__]
    return next((library for library in libraries if library in ("torch", "cupy", "pycuda")), libraries[0])


def mark_written(array: Any) -> None:
    """Tells the library of an array that its contents were written: PyTorch's autograd refuses to use what it saved before."""
    if _library(array) == "torch":
        importlib.import_module("torch").autograd.graph.increment_version(array)


def _current_stream(array: Any) -> int:
    """The handle of PyTorch's current stream on the GPU of a tensor."""
    return int(importlib.import_module("torch").cuda.current_stream(array.device).cuda_stream)


@contextmanager
def _current(array: Any, stream: int) -> Iterator[None]:
    """Makes a stream, and the GPU of an array, the current ones of PyTorch or CuPy."""
    if _library(array) == "cupy":
        with array.device, importlib.import_module("cupy").cuda.ExternalStream(stream):  # the stream alone leaves the GPU
            yield
    elif array.is_cuda:
        cuda = importlib.import_module("torch").cuda
        by_default = stream in (0, LEGACY_STREAM)  # of 0, ExternalStream makes some other stream, which waits for nothing
        with cuda.stream(cuda.default_stream(array.device) if by_default else cuda.ExternalStream(stream, array.device)):
            yield
    else:
        yield


def stream_handle(stream: object, array: Any) -> int:
    """The handle of a stream: a number, or PyTorch's, CuPy's or PyCUDA's stream. None: PyTorch's or CuPy's current one where the
    array is theirs, else the default stream, 0.

    Raises:
        InputTypeError: it is none of these.
    """
    if stream is None:
        library = _library(array)
        if library == "torch":
            return _current_stream(array)
        if library == "cupy":
            with array.device:  # each has a current stream
                return int(importlib.import_module("cupy").cuda.get_current_stream().ptr)
        return 0
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise InputTypeError(f"stream must be the handle of a CUDA stream, or a stream of PyTorch, CuPy or PyCUDA, not "
                         f"{type(stream).__name__}")
