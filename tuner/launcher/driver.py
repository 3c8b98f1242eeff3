"""The CUDA driver through ctypes: a device's primary context, its limits, and loaded kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from codegen.limits import Limits, target
from tuner.errors import LaunchError, ToolchainError
from tuner.executors.cuda_limits import architecture, known, read_limits

LIBRARY = "libcuda.so.1"

_OPT_IN = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1, "CLOCK_RATE": 13, "MULTIPROCESSOR_COUNT": 16, "MEMORY_CLOCK_RATE": 36,
    "GLOBAL_MEMORY_BUS_WIDTH": 37, "L2_CACHE_SIZE": 38, "MAX_THREADS_PER_MULTIPROCESSOR": 39, "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 81, "MAX_REGISTERS_PER_MULTIPROCESSOR": 82,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97, "MAX_BLOCKS_PER_MULTIPROCESSOR": 106, "RESERVED_SHARED_MEMORY_PER_BLOCK": 111}
"""CU_DEVICE_ATTRIBUTE_*, by cuda.h."""

_COPY_SHARE = 0.9
"""Of a GPU's nominal memory bandwidth, what a large copy reaches, as in codegen.limits: what an H200 does."""


class Driver:
    """The driver's functions.

    Args:
        library: gives each by its name, as a ctypes library does.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self("cuInit", 0)

    def __call__(self, function: str, *arguments: object) -> None:
        """Calls a function.

        Raises:
            LaunchError: it failed; the message has the driver's words.
        """
        status = int(self._library[function](*arguments))
        if status != 0:
            raise LaunchError(f"{function} failed: {self.words(status)}")

    def has(self, function: str) -> bool:
        """Whether the driver has a function, which an older one may lack."""
        try:
            return bool(self._library[function])
        except (AttributeError, KeyError):
            return False

    def address(self, function: str) -> int:
        """Where a function begins."""
        found = ctypes.cast(self._library[function], ctypes.c_void_p).value
        assert found is not None
        return found

    def device_of(self, address: int) -> int:
        """The number of the GPU on which an address is.

        Raises:
            LaunchError: on none.
        """
        index = ctypes.c_int()
        self("cuPointerGetAttribute", ctypes.byref(index), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_uint64(address))
        return index.value

    def words(self, status: int) -> str:
        """What a status means."""
        text = ctypes.c_char_p()
        self._library["cuGetErrorString"](ctypes.c_int(status), ctypes.byref(text))
        return text.value.decode() if text.value else f"error {status}"


class Device:
    """One GPU of this process, by its number there. Its primary context, which PyTorch uses too, stays retained.

    Attributes:
        driver: the functions.
        name: "NVIDIA H200".
        context: the handle of the primary context.
        limits: of the device.

    Raises:
        LaunchError: there is no such GPU, or it cannot be used.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver = driver
        self._number = ctypes.c_int()
        driver("cuDeviceGet", ctypes.byref(self._number), ctypes.c_int(index))
        name = ctypes.create_string_buffer(256)
        driver("cuDeviceGetName", name, ctypes.c_int(len(name)), self._number)
        self.name = name.value.decode()
        context = ctypes.c_void_p()
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._number)
        self.context = int(context.value or 0)
        self.limits = self._read_limits()

    def attribute(self, name: str) -> int:
        """A device attribute by its name in cuda.h, without CU_DEVICE_ATTRIBUTE_."""
        value = ctypes.c_int()
        self.driver("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_ATTRIBUTES[name]), self._number)
        return value.value

    def _read_limits(self) -> Limits:
        capability = self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")
        table = known(self.name, capability, self.attribute("MULTIPROCESSOR_COUNT"))
        if table is not None:
            copy_tbps, launch_us = table.copy_tbps, table.launch_us
        else:  # two transfers a clock
            width = self.attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
            copy_tbps = _COPY_SHARE * 2.0 * 1e3 * self.attribute("MEMORY_CLOCK_RATE") * width / 1e12
            launch_us = target("sm_90").launch_us
        return read_limits(self.name, capability, self.attribute, copy_tbps=copy_tbps, launch_us=launch_us)

    @property
    def arch(self) -> str:
        """As nvcc spells it: "sm_90a"."""
        return architecture((self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")))

    def load(self, cubin: bytes, dynamic_shared: Mapping[str, int]) -> dict[str, int]:
        """The handles of a cubin's kernels, which stay loaded.

        Args:
            cubin: the machine code.
            dynamic_shared: by kernel, the most dynamic shared memory it is launched with, bytes.

        Raises:
            LaunchError: the code does not load, or a kernel is not in it.
        """
        handles = {}
        with self._current(), self._beside_captures():
            module = ctypes.c_void_p()
            self.driver("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
            for name, shared_bytes in dynamic_shared.items():
                function = ctypes.c_void_p()
                self.driver("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
                if shared_bytes > 0:
                    self.driver("cuFuncSetAttribute", function, ctypes.c_int(_OPT_IN), ctypes.c_int(shared_bytes))
                handles[name] = int(function.value or 0)
        return handles

    def order(self, before: int, after: int) -> None:
        """Lets what is enqueued on a stream from now on wait for what another has been given so far.

        Raises:
            LaunchError: the driver refused it.
        """
        with self._current():
            event = ctypes.c_void_p()
            self.driver("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_NO_TIMING))
            try:
                self.driver("cuEventRecord", event, ctypes.c_void_p(before))
                self.driver("cuStreamWaitEvent", ctypes.c_void_p(after), event, ctypes.c_uint(0))
            finally:
                self.driver("cuEventDestroy_v2", event)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Another stream, or another thread, may be in the middle of a capture, which what takes memory would end, unless it is
        declared to have nothing to do with that."""
        mode = ctypes.c_int(_RELAXED)
        self.driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    @contextmanager
    def _current(self) -> Iterator[None]:
        self.driver("cuCtxPushCurrent_v2", ctypes.c_void_p(self.context))
        try:
            yield
        finally:
            self.driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def open_driver() -> Driver:
    """The driver of this machine.

    Raises:
        ToolchainError: there is none, or it finds no GPU.
    """
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise ToolchainError(f"the CUDA driver cannot be loaded ({error})") from error
    except LaunchError as error:
        raise ToolchainError(f"the CUDA driver finds no GPU to use ({error})") from error
