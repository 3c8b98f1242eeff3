"""A stand-in for libcuda whose kernels run on the host executor: all that tuner.launcher and tuner.torch ask of a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from codegen.render import Source
from tests.fake_cuda import ATTRIBUTES
from tuner.errors import LaunchError
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels, Memory
from tuner.launcher import driver as driver_module

FAILED = 700
CONTEXT = 0xC0DE
GLOBAL, RELAXED = 0, 2  # CUstreamCaptureMode

_VALUES = {**ATTRIBUTES, "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MEMORY_CLOCK_RATE": 3_000_000,
           "GLOBAL_MEMORY_BUS_WIDTH": 6144}
_BY_NUMBER = {number: _VALUES[name] for name, number in driver_module._ATTRIBUTES.items()}
_INT, _UINT, _POINTER, _SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = [("function", _POINTER), ("grid", _UINT * 3), ("block", _UINT * 3), ("shared_bytes", _UINT),
                ("arguments", ctypes.POINTER(_POINTER)), ("extra", _POINTER), ("kernel", _POINTER), ("context", _POINTER)]


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", _INT), ("pad", _INT), ("value", _INT * 16)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", _UINT * 3), ("block", _UINT * 3), ("shared_bytes", _UINT), ("stream", _POINTER),
                ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", _UINT)]


@dataclass(frozen=True, slots=True)
class Node:
    """A kernel of a graph. `after`: the node it waits for, counted from 1; 0: none. `overlaps`: it waits by itself."""

    function: int
    grid: int
    block: int
    shared_bytes: int
    params: bytes
    after: int = 0
    overlaps: bool = False


class FakeDriver:
    """The library: functions by name, each a C function pointer.

    Args:
        executor: runs the kernels.

    Attributes:
        functions: by name.
        current: the stack of contexts of the calling thread; its last entry is current.
        log: what was enqueued, in order: kernel names, with "overlapping" where they may begin before the one before them has
            ended, and "fill N" with bytes.
        streams: on which streams.
        fail: a function that fails from now on.
        memory: fenced memory that the kernels may touch; None: ordinary memory.
        params: the bytes that each launch got.
        capturing: streams that are captured, in the mode that forbids all threads what takes memory, unless they relax it.
        spoilt: whether a capture was ended by what it forbids.
        graphs: the nodes of each graph that was made.
        name, ordinal: of the device.
    """

    def __init__(self, executor: HostExecutor) -> None:
        self._executor = executor
        self._loaded: list[Kernels] = []
        self._functions: list[tuple[Kernels, str]] = []
        self._next: tuple[Source, Kernels] | None = None
        self._threads = threading.local()
        self.log: list[str] = []
        self.streams: list[int] = []
        self.fail = ""
        self.fault: LaunchError | None = None
        self.memory: Memory | None = None
        self.params: list[bytes] = []
        self.capturing: set[int] = set()
        self.spoilt = False
        self.graphs: list[list[Node]] = []
        self.opted_in: dict[str, int] = {}
        self.name, self.ordinal = "NVIDIA H200", 0
        self.functions = {name: ctypes.CFUNCTYPE(_INT, *types)(self._guarded(name, function))
                      for name, (types, function) in self._table().items()}

    def _exchange_mode(self, mode: int) -> None:
        asked = _INT.from_address(mode).value
        _store(_INT, mode, getattr(self._threads, "mode", GLOBAL))
        self._threads.mode = asked

    def _takes_memory(self) -> None:
        if self.capturing and getattr(self._threads, "mode", GLOBAL) != RELAXED:
            self.spoilt = True
            raise LaunchError("operation not permitted when stream is capturing")

    @property
    def current(self) -> list[int]:
        if not hasattr(self._threads, "current"):
            self._threads.current = []
        stack: list[int] = self._threads.current
        return stack

    def __getitem__(self, name: str) -> Any:
        return self.functions[name]

    def compiled(self, source: Source) -> bytes:
        """What stands for the machine code of a source: its place among those compiled so far."""
        names = tuple(dict.fromkeys(launch.kernel for launch in source.plan.launches))
        self._loaded.append(self._executor.load(source.text, names))
        self._sizes = self._loaded[-1].params_bytes
        return str(len(self._loaded) - 1).encode()

    def _guarded(self, name: str, function: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if self.fail == name:
                return FAILED
            try:
                function(*arguments)
            except LaunchError as error:
                self.fault = error
                return FAILED
            return 0

        return call

    def _table(self) -> dict[str, tuple[Sequence[Any], Callable[..., None]]]:
        return {
            "cuInit": ([_UINT], lambda flags: None),
            "cuDeviceGet": ([_POINTER, _INT], lambda to, index: _store(_INT, to, index)),
            "cuDeviceGetName": ([_POINTER, _INT, _INT], lambda to, size, device: _text(to, self.name)),
            "cuDeviceGetAttribute": ([_POINTER, _INT, _INT],
                                     lambda to, which, device: _store(_INT, to, _BY_NUMBER[which])),
            "cuDevicePrimaryCtxRetain": ([_POINTER, _INT], lambda to, device: _store(_POINTER, to, CONTEXT)),
            "cuCtxGetCurrent": ([_POINTER], lambda to: _store(_POINTER, to, self.current[-1] if self.current else 0)),
            "cuCtxPushCurrent_v2": ([_POINTER], lambda context: self.current.append(context)),
            "cuCtxPopCurrent_v2": ([_POINTER], lambda to: _store(_POINTER, to, self.current.pop())),
            "cuPointerGetAttribute": ([_POINTER, _INT, ctypes.c_uint64],
                                      lambda to, which, address: _store(_INT, to, self.ordinal)),
            "cuEventCreate": ([_POINTER, _UINT], lambda to, flags: _store(_POINTER, to, 0xE)),
            "cuEventRecord": ([_POINTER, _POINTER], lambda event, stream: self.log.append(f"record {stream}")),
            "cuStreamWaitEvent": ([_POINTER, _POINTER, _UINT], lambda stream, event, flags: self.log.append(f"wait {stream}")),
            "cuEventDestroy_v2": ([_POINTER], lambda event: None),
            "cuModuleLoadData": ([_POINTER, ctypes.c_char_p], self._load),
            "cuModuleGetFunction": ([_POINTER, _POINTER, ctypes.c_char_p], self._function),
            "cuFuncSetAttribute": ([_POINTER, _INT, _INT], self._set),
            "cuGetErrorString": ([_INT, _POINTER], lambda status, to: _store(ctypes.c_char_p, to, b"an illegal memory access")),
            "cuMemsetD8Async": ([ctypes.c_ulonglong, ctypes.c_ubyte, _SIZE, _POINTER],
                                lambda to, value, count, stream: self._fill(to, value, count, stream)),
            "cuMemsetD32Async": ([ctypes.c_ulonglong, _UINT, _SIZE, _POINTER],
                                 lambda to, value, count, stream: self._fill(to, value, 4 * count, stream)),
            "cuLaunchKernel": ([_POINTER, *[_UINT] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER], self._launch),
            "cuLaunchKernelEx": ([_POINTER, _POINTER, ctypes.POINTER(_POINTER), _POINTER], self._launch_with),
            "cuGraphAddDependencies_v2": ([_POINTER] * 4 + [_SIZE], self._connect),
            "cuThreadExchangeStreamCaptureMode": ([_POINTER], self._exchange_mode),
            "cuStreamIsCapturing": ([_POINTER, _POINTER], lambda stream, to: _store(_INT, to, (stream or 0) in self.capturing)),
            "cuGraphCreate": ([_POINTER, _UINT], self._create_graph),
            "cuGraphAddKernelNode_v2": ([_POINTER, _POINTER, _POINTER, _SIZE, _POINTER], self._add_node),
            "cuGraphInstantiateWithFlags": ([_POINTER, _POINTER, ctypes.c_ulonglong],
                                            lambda to, graph, flags: self._instantiate(to, graph)),
            "cuGraphExecKernelNodeSetParams_v2": ([_POINTER] * 3, self._set_node),
            "cuGraphLaunch": ([_POINTER] * 2, self._launch_graph)}

    def _instantiate(self, to: int, graph: int) -> None:
        self._takes_memory()
        if any(node.after != place for place, node in enumerate(self.graphs[graph - 1])):
            raise LaunchError("a node does not come after the one before")
        _store(_POINTER, to, graph)

    def _create_graph(self, to: int, flags: int) -> None:
        self.graphs.append([])
        _store(_POINTER, to, len(self.graphs))

    def _add_node(self, to: int, graph: int, after: int | None, count: int, values: int) -> None:
        nodes = self.graphs[graph - 1]
        before = _POINTER.from_address(after).value or 0 if after and count == 1 else 0
        nodes.append(replace(self._node(values), after=before))
        _store(_POINTER, to, len(nodes))

    def _connect(self, graph: int, before: int, after: int, edge: int, count: int) -> None:
        from_port, to_port, kind = ctypes.string_at(edge, 3)
        if (from_port, to_port, kind, count) != (1, 0, 1, 1):
            raise LaunchError("no edge of a kernel that lets the next begin")
        nodes, place = self.graphs[graph - 1], (_POINTER.from_address(after).value or 0) - 1
        nodes[place] = replace(nodes[place], after=_POINTER.from_address(before).value or 0, overlaps=True)

    def _set_node(self, executable: int, node: int, values: int) -> None:
        nodes, new = self.graphs[executable - 1], self._node(values)
        old = nodes[node - 1]
        if new.function != old.function:
            raise LaunchError("another function")
        nodes[node - 1] = replace(new, after=old.after, overlaps=old.overlaps)

    def _launch_graph(self, executable: int, stream: int | None) -> None:
        self.log.append(f"graph {executable}")
        for node in self.graphs[executable - 1]:
            self._run(node.function, node.grid, node.block, node.shared_bytes, node.params, stream, node.overlaps)

    def _node(self, values: int) -> Node:
        node = _KernelNode.from_address(values)
        return Node(node.function, node.grid[0], node.block[0], node.shared_bytes, self._params(node.function, node.arguments[0]))

    def _params(self, function: int, argument: int) -> bytes:
        return ctypes.string_at(argument, self._functions[function - 1][0].params_bytes)

    def _load(self, to: int, image: bytes) -> None:
        self._check()
        self._takes_memory()
        _store(_POINTER, to, int(image.decode()) + 1)

    def _function(self, to: int, module: int, name: bytes) -> None:
        self._functions.append((self._loaded[module - 1], name.decode()))
        _store(_POINTER, to, len(self._functions))

    def _set(self, function: int, attribute: int, value: int) -> None:
        assert attribute == 8
        self.opted_in[self._functions[function - 1][1]] = value

    def _fill(self, to: int, value: int, count: int, stream: int | None) -> None:
        self._check()
        ctypes.memset(to, value, count)
        self.log.append(f"fill {count}")
        self.streams.append(stream or 0)

    def _launch(self, function: int, grid: int, _y: int, _z: int, block: int, _by: int, _bz: int, shared: int, stream: int | None,
                arguments: Any, extra: int | None) -> None:
        self._run(function, grid, block, shared, self._params(function, arguments[0]), stream)

    def _launch_with(self, config: int, function: int, arguments: Any, extra: int | None) -> None:
        asked = _LaunchConfig.from_address(config)
        attributes = [(asked.attributes[i].id, asked.attributes[i].value[0]) for i in range(asked.count)]
        if attributes != [(6, 1)] or (*asked.grid[1:], *asked.block[1:]) != (1, 1, 1, 1):
            raise LaunchError("other attributes than those of a launch that overlaps")
        self._run(function, asked.grid[0], asked.block[0], asked.shared_bytes, self._params(function, arguments[0]), asked.stream,
                  True)

    def _run(self, function: int, grid: int, block: int, shared: int, params: bytes, stream: int | None,
             overlaps: bool = False) -> None:
        self._check()
        kernels, name = self._functions[function - 1]
        assert shared <= max(self.opted_in.get(name, 0), 48 << 10)
        self.params.append(params)
        self.log.append(f"overlapping {name}" if overlaps else name)
        self.streams.append(stream or 0)
        with nullcontext(self.memory) if self.memory is not None else kernels.memory() as memory:
            kernels.launch(name, grid=grid, block=block, params=params, memory=memory, shared_bytes=shared, overlaps=overlaps)

    def _check(self) -> None:
        """Work needs the device's context, as on a GPU."""
        if not self.current or self.current[-1] != CONTEXT:
            raise LaunchError("invalid device context")


def _store(kind: Any, to: int, value: Any) -> None:
    kind.from_address(to).value = value


def _text(to: int, text: str) -> None:
    ctypes.memmove(to, text.encode() + b"\0", len(text) + 1)
