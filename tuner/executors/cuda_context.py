"""The GPU of this process through PyCUDA: its primary context, usable from any thread, and errors as sentences.

The primary context is the one that the CUDA runtime uses, so memory is shared with PyTorch and both can work in one process. It
is current only while a block of `Gpu.active` runs. A context left current when the process ends would abort it.

PyCUDA knows no graphs; `Gpu.bindings` is the driver interface of cuda-bindings, which works on the same context and streams.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tuner.errors import DeviceLost, LaunchError, NoSuchDevice, ToolchainError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy stream, on which other libraries may work


class _BindingsError(Exception):
    """A call through cuda-bindings failed; `Gpu.active` turns it into a LaunchError."""


def _import_driver() -> Any:
    """pycuda.driver, initialised."""
    try:
        import pycuda.driver as driver
    except ImportError as error:
        raise ToolchainError(
            f"PyCUDA cannot be used ({error}); install the extra `cuda` on a machine with an NVIDIA driver") from error
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        raise ToolchainError(f"the CUDA driver finds no GPU to use ({_plain(error)})") from error
    if count == 0:
        raise ToolchainError("the CUDA driver finds no GPU to use")
    return driver


def why_unavailable() -> str | None:
    """Why no GPU can be used here, as a sentence; None where one can. Creates no context."""
    try:
        _import_driver()
    except ToolchainError as error:
        return str(error)
    return None


def _import_bindings() -> Any:
    """The driver interface of cuda-bindings, which has had two names."""
    try:
        from cuda.bindings import driver
    except ImportError:
        try:
            from cuda import cuda as driver
        except ImportError as error:
            raise ToolchainError(
                f"cuda-bindings, which times kernels by graphs, cannot be used ({error}); install the extra `cuda`") from error
    return driver


def gpu_index(bus_id: str) -> int:
    """The number of the GPU with that PCI address.

    Raises:
        ToolchainError: there is none.
    """
    driver = _import_driver()
    for index in range(driver.Device.count()):
        if driver.Device(index).pci_bus_id() == bus_id:
            return index
    raise ToolchainError(f"this process finds no GPU with the PCI address {bus_id}")


@functools.cache
def open_gpu(index: int) -> Gpu:
    """The GPU with that number; one object a process.

    Raises:
        ToolchainError: it cannot be used here, or there is no GPU of that number.
    """
    return Gpu(index)


class Gpu:
    """One GPU's primary context. Open it with `open_gpu`.

    Attributes:
        driver: pycuda.driver.
        bindings: the driver interface of cuda-bindings.
        name: as the driver states it: "NVIDIA H200".
        compute_capability: (9, 0).
        memory_bytes: device memory.
        bus_id: its PCI address, "0000:3b:00.0".
        stream: where all work goes, a pycuda.driver.Stream.

    Raises:
        ToolchainError: as open_gpu.
    """

    def __init__(self, index: int) -> None:
        self.driver: Any = _import_driver()
        self.bindings: Any = _import_bindings()
        count = self.driver.Device.count()
        if not 0 <= index < count:
            raise NoSuchDevice(f"there is no GPU {index}; this machine has {count}, counted from 0")
        self._device = self.driver.Device(index)
        self.name: str = self._device.name()
        self.compute_capability: tuple[int, int] = self._device.compute_capability()
        self.memory_bytes: int = self._device.total_memory()
        self.bus_id: str = self._device.pci_bus_id()
        self._lock = threading.RLock()
        self._dead: str | None = None
        self._discarded: list[Any] = []
        try:
            self._context = self._device.retain_primary_context()
        except self.driver.Error as error:
            raise ToolchainError(f"GPU {index} cannot be used ({_plain(error)})") from error
        atexit.register(self._detach)
        with self.active():
            self.stream: Any = self.driver.Stream(_NON_BLOCKING)

    @property
    def alive(self) -> bool:
        """Whether the context can still be used."""
        return self._dead is None

    def attribute(self, name: str) -> int:
        """A device attribute by its name in pycuda.driver.device_attribute."""
        return int(self._device.get_attribute(getattr(self.driver.device_attribute, name)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes the context current in this thread for the length of the block; one thread at a time, blocks may nest.

        Raises:
            LaunchError: a CUDA call in the block failed.
            DeviceLost: it left the context dead, or an earlier one did.
        """
        with self._lock:
            if self._dead is not None:
                raise DeviceLost(self._dead)
            self._context.push()
            try:
                self._discarded.clear()
                yield
            except (self.driver.Error, _BindingsError) as error:
                raise self._explained(error) from error
            finally:
                self._context.pop()

    def call(self, function: str, *arguments: object) -> Any:
        """Calls a function of cuda-bindings by name and returns what it returns beside its status.

        Raises:
            _BindingsError: it failed; inside `active` only.
        """
        status, *values = getattr(self.bindings, function)(*arguments)
        if status != self.bindings.CUresult.CUDA_SUCCESS:
            _, text = self.bindings.cuGetErrorString(status)
            raise _BindingsError(f"{function} failed: {text.decode() if text else status}")
        return values[0] if len(values) == 1 else values

    def discard(self, resource: object) -> None:
        """Keeps a PyCUDA object that nobody needs any more until the context is current again, and lets go of it then.

        For `__del__`, which may run in any thread and at any time. Where the context is not current, PyCUDA cannot free it.
        """
        self._discarded.append(resource)

    def _explained(self, error: Exception) -> LaunchError:
        """Called with the context current. After some errors every further call fails; asking once more tells which."""
        try:
            self.driver.Context.synchronize()
        except self.driver.Error:
            # The call that reports the error is any later one, not the one at fault.
            reason = _parted(error)[0]
            self._dead = (f"the GPU cannot be used by this process any more, since an earlier kernel failed ({reason}); "
                          "start a new process")
            return DeviceLost(f"the kernel failed and took the process's GPU context with it: {reason}")
        return LaunchError(f"the GPU refused the work: {_plain(error)}")

    def _detach(self) -> None:
        """Afterwards PyCUDA no longer tries to free what lies in the context, which ends with the process."""
        self._context.detach()


class Module:
    """Loaded kernels of one compiled source. Use it inside `Gpu.active`.

    Args:
        cubin: the machine code.
        dynamic_shared: kernel name -> the most dynamic shared memory it will be launched with, bytes.
        overlapping: those of these kernels that will be launched so that they overlap with the launch before.

    Raises:
        pycuda.driver.Error: the code does not load, or a kernel is not in it.
    """

    def __init__(self, gpu: Gpu, cubin: bytes, dynamic_shared: dict[str, int], overlapping: Collection[str] = ()) -> None:
        self._gpu = gpu
        self._module: Any = None
        self._overlapping: Overlapping | None = None
        if overlapping:
            self._overlapping = Overlapping(gpu, cubin, {name: dynamic_shared[name] for name in overlapping})
        self._module = gpu.driver.module_from_buffer(cubin)
        self._functions: dict[str, Any] = {}
        opt_in = gpu.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        for name, shared_bytes in dynamic_shared.items():
            function = self._module.get_function(name)
            if shared_bytes > 0:
                function.set_attribute(opt_in, shared_bytes)
            self._functions[name] = function

    def __del__(self) -> None:
        if self._module is not None:
            self._gpu.discard(self._module)
        if self._overlapping is not None:
            self._gpu.discard(self._overlapping)

    def launch(self, kernel: str, *, grid: int, block: int, shared_bytes: int, params: bytes, overlaps: bool = False) -> None:
        """Enqueues a kernel that takes one struct by value, `params` its bytes.

        `overlaps`: it may begin while the launch before it on the stream still runs, as far as that lets it.
        """
        if overlaps:
            assert self._overlapping is not None, "it was said to overlap when it was loaded"
            self._overlapping.launch(kernel, grid=grid, block=block, shared_bytes=shared_bytes, params=params)
            return
        function = self._functions[kernel].prepare([f"{len(params)}s"])
        function.prepared_async_call((grid, 1), (block, 1, 1), self._gpu.stream, params, shared_size=shared_bytes)


class Overlapping:
    """Kernels that may begin while the launch before them still runs. PyCUDA hands no attribute of a launch on and does not tell
    the handle of a function, so cuda-bindings loads the code once more. Use it inside `Gpu.active`.

    Args:
        cubin: the machine code.
        dynamic_shared: kernel name -> the most dynamic shared memory it will be launched with, bytes.
    """

    def __init__(self, gpu: Gpu, cubin: bytes, dynamic_shared: Mapping[str, int]) -> None:
        self._gpu = gpu
        self._module: Any = None
        self._module = gpu.call("cuModuleLoadData", cubin)
        self._functions = {name: gpu.call("cuModuleGetFunction", self._module, name.encode()) for name in dynamic_shared}
        opt_in = gpu.bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for name, shared_bytes in dynamic_shared.items():
            if shared_bytes > 0:
                gpu.call("cuFuncSetAttribute", self._functions[name], opt_in, shared_bytes)

    def __del__(self) -> None:
        if self._module is not None:  # through Gpu.discard, so that the context is current
            self._gpu.bindings.cuModuleUnload(self._module)

    def launch(self, kernel: str, *, grid: int, block: int, shared_bytes: int, params: bytes) -> None:
        """Enqueues a kernel that takes one struct by value, `params` its bytes."""
        bindings = self._gpu.bindings
        overlap = bindings.CUlaunchAttribute()
        overlap.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config = bindings.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = bindings.CUstream(self._gpu.stream.handle)
        config.attrs, config.numAttrs = [overlap], 1
        struct = ctypes.create_string_buffer(params, len(params))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(struct))  # copied before the call returns
        self._gpu.call("cuLaunchKernelEx", config, self._functions[kernel], ctypes.addressof(arguments), 0)


def _parted(error: Exception) -> tuple[str, str]:
    """("an illegal memory access was encountered", "cuCtxSynchronize") of the error's text "cuCtxSynchronize failed: an ..."."""
    routine, failed, reason = str(error).partition(" failed: ")
    return (reason, routine) if failed else (str(error), "")


def _plain(error: Exception) -> str:
    """The error with the function that failed in brackets."""
    reason, routine = _parted(error)
    return f"{reason} ({routine})" if routine else reason
