"""Stand-ins for PyCUDA and cuda-bindings without a GPU: device memory is host memory, kernels are Python functions.

They are strict about what would abort or hang a real process: contexts must be popped, and work may be done only while one is
current. They say nothing about whether CUDA code is right.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.params import pointer_fields
from codegen.plan import Plan
from codegen.tensors import BY_NAME, INPUTS
from tuner.dtypes import NUMPY
from tuner.executors import cuda as cuda_module
from tuner.executors.cuda import CudaExecutor
from tuner.executors.cuda_context import Gpu
from tuner.inputs import Inputs
from tuner.reference import reference
from tuner.store import Store
from tuner.timing import clocks

FakeKernel = Callable[["Arguments"], None]

ATTRIBUTES = {
    "MULTIPROCESSOR_COUNT": 132, "MAX_THREADS_PER_BLOCK": 1024, "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32, "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024, "L2_CACHE_SIZE": 62914560, "CLOCK_RATE": 1980000,
}


class Arguments:
    """What a kernel receives: `struct Params` taken apart, and the launch."""

    def __init__(self, plan: Plan, params: bytes, grid: int, block: int, shared_bytes: int) -> None:
        fields = pointer_fields(plan)
        *pointers, self.rows, self.eps, self.splits = struct.unpack(f"<{len(fields)}Qqfi", params)
        self.pointers: dict[str, int] = dict(zip(fields, pointers, strict=True))
        self.grid, self.block, self.shared_bytes = grid, block, shared_bytes

    def array(self, name: str, *shape: int, at: int = 0, dtype: str = "float32") -> NDArray[Any]:
        """The tensor's memory from element `at` on, writable, not bounded by anything."""
        element = NUMPY[dtype]
        size = int(np.prod(shape)) * element.itemsize
        start = self.pointers[name] + element.itemsize * at
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)).view(element).reshape(shape)


def solve_in(dtype: str, param_dtype: str, hidden: int, out: int) -> FakeKernel:
    """A kernel for those data types that is right: the reference on what the pointers point to."""
    def tensor(given: Arguments, name: str) -> NDArray[Any] | None:
        if not given.pointers[name]:
            return None
        entry = BY_NAME[name]
        return given.array(name, *entry.shape(given.rows, hidden, out), dtype=entry.dtype(dtype, param_dtype))

    def kernel(given: Arguments) -> None:
        read = {name: None if (array := tensor(given, name)) is None else array.copy() for name in INPUTS}
        for name, values in reference(Inputs(**read, eps=given.eps)).present().items():
            if (result := tensor(given, name)) is not None:
                result[...] = values.astype(result.dtype)

    return kernel


class FakeError(Exception):
    """pycuda.driver.Error."""


class FakeMemoryError(FakeError):
    """pycuda.driver.MemoryError."""


class FakeCuda:
    """Both modules, and what was done with them.

    Attributes:
        driver, bindings: to stand in for pycuda.driver and cuda.bindings.driver.
        plan: of the source that runs, to take `struct Params` apart.
        kernels: by name, what a launch does; of others, nothing.
        launches: every launch of one of these, in order.
        uploads: how many arrays were copied to the device.
        call_ms: the time that each captured operation takes.
        depth: how often contexts were pushed and not popped.
        allocated: live allocations, address -> bytes.
        free_bytes: device memory left.
        sticky: an error that every further call raises, as after an illegal access.
        graphs: captured graphs that were not destroyed yet.
        overlapping: the kernels that were launched so that they overlap with the one before, in order.
        modules: those that cuda-bindings has loaded and not unloaded.
    """

    def __init__(self, name: str = "NVIDIA H200", kernels: Mapping[str, FakeKernel] | None = None) -> None:
        self.kernels = dict(kernels or {})
        self.plan = Plan(())
        self.launches: list[tuple[str, Arguments]] = []
        self.uploads = 0
        self.depth = 0
        self.allocated: dict[int, Any] = {}
        self.free_bytes = 1 << 30
        self.sticky: str | None = None
        self.graphs: set[int] = set()
        self.overlapping: list[str] = []
        self.modules: set[int] = set()
        self._capture: list[Callable[[], object]] | None = None
        self._recorded: dict[int, list[Callable[[], object]]] = {}
        self._ids = itertools.count(1)
        self._clock_ms = 0.0
        self.call_ms = 0.02
        self.driver = self._make_driver(name)
        self.bindings = self._make_bindings()

    @property
    def capturing(self) -> bool:
        """Whether a capture was begun and not ended."""
        return self._capture is not None

    def _check(self) -> None:
        if self.depth == 0:
            raise FakeError("cuAny failed: invalid device context")
        if self.sticky is not None:
            raise FakeError(f"cuAny failed: {self.sticky}")

    def _enqueue(self, work: Callable[[], object]) -> None:
        self._check()
        if self._capture is not None:
            self._capture.append(work)
        else:
            work()
            self._clock_ms += self.call_ms

    def _make_driver(self, name: str) -> SimpleNamespace:
        fake = self

        class Context:
            def push(self) -> None:
                fake.depth += 1

            @staticmethod
            def pop() -> None:
                assert fake.depth > 0
                fake.depth -= 1

            @staticmethod
            def synchronize() -> None:
                fake._check()

            def detach(self) -> None:
                pass

        class Device:
            count = staticmethod(lambda: 1)

            def __init__(self, index: int) -> None:
                assert index == 0

            name = staticmethod(lambda: name)
            compute_capability = staticmethod(lambda: (9, 0))
            total_memory = staticmethod(lambda: 1 << 30)
            pci_bus_id = staticmethod(lambda: "0000:3B:00.0")
            get_attribute = staticmethod(ATTRIBUTES.__getitem__)
            retain_primary_context = staticmethod(Context)

        class Stream:
            def __init__(self, flags: int) -> None:
                fake._check()
                self.handle = 1

            def synchronize(self) -> None:
                fake._check()

        class Event:
            def record(self, stream: Stream) -> None:
                fake._check()
                self.at = fake._clock_ms

            def synchronize(self) -> None:
                fake._check()

            def time_since(self, other: Event) -> float:
                return self.at - other.at

        class Allocation:
            def __init__(self, size: int) -> None:
                fake._check()
                if size > fake.free_bytes:
                    raise FakeMemoryError("cuMemAlloc failed: out of memory")
                buffer = np.empty(size // 4 + 64, np.uint32)
                self.address, self.size = -(-buffer.ctypes.data // 256) * 256, size
                fake.allocated[self.address] = buffer
                fake.free_bytes -= size

            def __int__(self) -> int:
                return self.address

            def free(self) -> None:
                fake._check()
                del fake.allocated[self.address]
                fake.free_bytes += self.size

        class Function:
            def __init__(self, name: str) -> None:
                self.name, self.opted_in = name, 48 << 10

            def set_attribute(self, attribute: str, value: int) -> None:
                self.opted_in = value

            def prepare(self, formats: list[str]) -> Function:
                return self

            def prepared_async_call(self, grid: tuple[int, int], block: tuple[int, int, int], stream: Stream, params: bytes, *,
                                    shared_size: int) -> None:
                if shared_size > self.opted_in:
                    raise FakeError("cuLaunchKernel failed: invalid argument")
                fake._enqueue(lambda: fake._run(self.name, params, grid[0], block[0], shared_size))

        def set_words(address: int, word: int, count: int, stream: Stream) -> None:
            assert int(address) % 4 == 0
            words = np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(int(address)))
            fake._enqueue(lambda: words.fill(word))

        def set_bytes(address: int, byte: int, count: int, stream: Stream) -> None:
            fake._enqueue(lambda: ctypes.memset(address, byte, count))

        def upload(address: int, values: NDArray[Any], stream: Stream) -> None:
            memoryview(values)  # PyCUDA takes buffers, and NumPy makes none of bfloat16
            fake.uploads += 1
            fake._enqueue(lambda: ctypes.memmove(address, values.ctypes.data, values.nbytes))

        def download(values: NDArray[Any], address: int, stream: Stream) -> None:
            memoryview(values)
            fake._enqueue(lambda: ctypes.memmove(values.ctypes.data, address, values.nbytes))

        return SimpleNamespace(
            Error=FakeError, MemoryError=FakeMemoryError, Context=Context, Device=Device, Stream=Stream, Event=Event,
            init=lambda: None, mem_alloc=Allocation, mem_get_info=lambda: (fake.free_bytes, 1 << 30),
            memset_d32_async=set_words, memset_d8_async=set_bytes, memcpy_htod_async=upload, memcpy_dtoh_async=download,
            memcpy_dtod_async=lambda to, source, size, stream: fake._enqueue(lambda: None),
            module_from_buffer=lambda cubin: SimpleNamespace(get_function=Function),
            device_attribute=SimpleNamespace(**{name: name for name in ATTRIBUTES}),
            function_attribute=SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"))

    def _run(self, name: str, params: bytes, grid: int, block: int, shared_bytes: int) -> None:
        if name in self.kernels:
            arguments = Arguments(self.plan, params, grid, block, shared_bytes)
            self.launches.append((name, arguments))
            self.kernels[name](arguments)

    def _make_bindings(self) -> SimpleNamespace:
        ok, failed = 0, 700

        def begin(stream: object, mode: object) -> tuple[int]:
            self._check()
            self._capture = []
            return (ok,)

        def end(stream: object) -> tuple[int, int]:
            assert self._capture is not None
            graph = next(self._ids)
            self.graphs.add(graph)
            self._recorded[graph], self._capture = self._capture, None
            return ok, graph

        def instantiate(graph: int, flags: int) -> tuple[int, int]:
            executable = next(self._ids)
            self.graphs.add(executable)
            self._recorded[executable] = self._recorded[graph]
            return ok, executable

        def destroy(graph: int) -> tuple[int]:
            self.graphs.remove(graph)
            return (ok,)

        def launch(executable: int, stream: object) -> tuple[int]:
            if self.sticky is not None:
                return (failed,)
            for work in self._recorded[executable]:
                work()
                self._clock_ms += self.call_ms
            return (ok,)

        functions: dict[int, list[Any]] = {}  # name, and the dynamic shared memory it may have

        def function(module: int, name: bytes) -> tuple[int, int]:
            handle = next(self._ids)
            functions[handle] = [name.decode(), 48 << 10]
            return ok, handle

        def allow(handle: int, attribute: str, value: int) -> tuple[int]:
            functions[handle][1] = value
            return (ok,)

        def launch_with(config: Any, handle: int, arguments: int, extra: int) -> tuple[int]:
            name, most = functions[handle]
            overlap, = config.attrs[:config.numAttrs]
            allowed = overlap.id == "overlap" and overlap.value.programmaticStreamSerializationAllowed
            if config.sharedMemBytes > most or not allowed:
                return (failed,)
            assert (config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ, config.hStream) == (1, 1, 1, 1, 1)
            size = struct.calcsize(f"<{len(pointer_fields(self.plan))}Qqfi")
            params = ctypes.string_at(ctypes.c_void_p.from_address(arguments).value or 0, size)
            self.overlapping.append(name)
            self._enqueue(lambda: self._run(name, params, config.gridDimX, config.blockDimX, config.sharedMemBytes))
            return (ok,)

        def load(image: bytes) -> tuple[int, int]:
            self.modules.add(module := next(self._ids))
            return ok, module

        def unload(module: int) -> tuple[int]:
            self._check()
            self.modules.remove(module)
            return (ok,)

        return SimpleNamespace(
            CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace()), CUlaunchConfig=SimpleNamespace,
            CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="overlap"),
            CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"),
            cuModuleLoadData=load, cuModuleGetFunction=function, cuFuncSetAttribute=allow, cuLaunchKernelEx=launch_with,
            cuModuleUnload=unload,
            CUresult=SimpleNamespace(CUDA_SUCCESS=ok), CUstream=lambda handle: handle,
            CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1),
            cuGetErrorString=lambda status: (ok, b"an illegal memory access was encountered"),
            cuStreamBeginCapture=begin, cuStreamEndCapture=end, cuGraphInstantiate=instantiate, cuGraphDestroy=destroy,
            cuGraphExecDestroy=destroy, cuGraphLaunch=launch)


def open_executor(monkeypatch: pytest.MonkeyPatch, store: Store, fake: FakeCuda) -> CudaExecutor:
    """An executor on the fake in place of the real modules, for one test."""
    monkeypatch.setitem(sys.modules, "pycuda", SimpleNamespace(driver=fake.driver))
    monkeypatch.setitem(sys.modules, "pycuda.driver", fake.driver)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=fake.bindings))
    monkeypatch.setattr(cuda_module, "open_gpu", Gpu)
    for name in ("WARM_SECONDS", "IDLE_SPELL_US"):  # a kernel is a Python function here, and warms nothing
        monkeypatch.setattr(clocks, name, 0.0)
    monkeypatch.setattr(clocks, "MAX_REPLAYS", 100)
    return CudaExecutor(store=store)
