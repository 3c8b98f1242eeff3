"""Compiled sources made ready to be replayed on one device: sizes are worked out once for each row count."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from codegen.dtypes import ITEMSIZE
from codegen.params import pack, pointer_fields
from codegen.plan import Fill, Launch, Plan
from codegen.render import Source
from codegen.tensors import BY_NAME, OUTPUTS, TENSORS
from tuner.errors import LaunchError
from tuner.executors.host_toolchain import Compiler, find_compiler
from tuner.launcher.driver import Device, Driver
from tuner.store import BuildKey, Store

TENSOR_FIELDS = tuple(tensor.name for tensor in TENSORS)
"""The tensors of a call, in the order in which their addresses are handed over."""

ALIGNMENT = 256
"""Of the workspace and of each scratch buffer in it, bytes."""

_SOURCE = Path(__file__).with_name("replay.cpp")
_LIBRARY = "replay.so"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti")
_MAX_GRID = 2**31 - 1


def adds(plan: Plan) -> frozenset[str]:
    """The outputs to which a plan adds what it finds, after they were zeroed: those that the blocks of its only launch share."""
    if len(plan.launches) > 1:
        return frozenset()
    return frozenset(name for step in plan.steps if isinstance(step, Fill) for name in step.names if name in OUTPUTS)


_FUNCTIONS = ("cuLaunchKernel", "cuMemsetD8Async", "cuMemsetD32Async", "cuCtxGetCurrent", "cuCtxPushCurrent_v2",
              "cuCtxPopCurrent_v2")
_GRAPH_FUNCTIONS = ("cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuGraphCreate", "cuGraphAddKernelNode_v2",
                    "cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch")
"""Of CUDA 12; where the driver is older, there are no graphs."""
_OVERLAP_FUNCTIONS = ("cuLaunchKernelEx", "cuGraphAddDependencies_v2")
"""Of CUDA 12.3; where the driver is older, launches do not overlap."""


class _Functions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*_FUNCTIONS, *_GRAPH_FUNCTIONS, *_OVERLAP_FUNCTIONS)]


class _Step(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("grid", ctypes.c_uint), ("block", ctypes.c_uint), ("shared_bytes", ctypes.c_uint),
                ("field", ctypes.c_uint), ("bytes", ctypes.c_size_t), ("overlaps", ctypes.c_uint)]


class _Call(ctypes.Structure):
    _fields_ = [("driver", ctypes.POINTER(_Functions)), ("context", ctypes.c_void_p), ("steps", ctypes.POINTER(_Step)),
                ("offsets", ctypes.POINTER(ctypes.c_size_t)), ("parameters", ctypes.c_char_p), ("graphs", ctypes.c_void_p),
                *((name, ctypes.c_uint) for name in ("steps_count", "tensors", "buffers", "parameters_bytes"))]


class Launcher:
    """replay.cpp, compiled, with one driver's functions.

    Args:
        driver: whose functions it calls.
        store: where it is kept.
        compiler: None: $CXX, or the first that is found.

    Raises:
        CompileError, ToolchainError: it cannot be compiled.
    """

    def __init__(self, driver: Driver, store: Store, compiler: Compiler | None = None) -> None:
        compiler = find_compiler() if compiler is None else compiler
        key = BuildKey("launcher", (("replay.cpp", _SOURCE.read_text(encoding="utf-8")),), _FLAGS, compiler.version)

        def build(folder: Path) -> None:
            compiler.run([*_FLAGS, "replay.cpp", "-o", _LIBRARY], folder, "the launcher")

        self._library = ctypes.CDLL(str(store.get_or_build(key, build) / _LIBRARY))
        self.replay: Any = self._library.lnl_replay
        self.replay.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
        self.replay.restype = ctypes.c_int
        self.address = int(ctypes.cast(self.replay, ctypes.c_void_p).value or 0)
        self.driver = driver
        self._has_graphs = all(driver.has(name) for name in _GRAPH_FUNCTIONS)
        named = [*_FUNCTIONS, *(_GRAPH_FUNCTIONS if self._has_graphs else ())]
        if all(driver.has(name) for name in _OVERLAP_FUNCTIONS):
            named += _OVERLAP_FUNCTIONS
        self.functions = _Functions(**{name: driver.address(name) for name in named})

    def graphs(self, plan: Plan) -> Any:
        """Memory for the graphs of a plan's launches; None where there can be none."""
        if not self._has_graphs or len(plan.launches) > self._constant("lnl_graph_nodes"):
            return None
        return (ctypes.c_uint64 * -(-self._constant("lnl_graphs_bytes") // 8))()

    def _constant(self, name: str) -> int:
        return ctypes.c_uint.in_dll(self._library, name).value


class Kernel:
    """The kernels of one source, loaded on one device.

    Args:
        launcher: what replays.
        device: where.
        source: the rendered source.
        cubin: its machine code.

    Raises:
        LaunchError: the code does not load.
    """

    def __init__(self, launcher: Launcher, device: Device, source: Source, cubin: bytes) -> None:
        shared: dict[str, int] = {}
        for launch in source.plan.launches:
            shared[launch.kernel] = max(launch.shared_bytes, shared.get(launch.kernel, 0))
        self.source = source
        self._launcher = launcher
        self._device = device
        self._handles = device.load(cubin, shared)
        self._graphs = launcher.graphs(source.plan)

    def at(self, rows: int, eps: float, kept: frozenset[str] = frozenset()) -> Replay:
        """Ready for a row count. To outputs that are `kept`, some of `adds`, the call adds instead of overwriting them.

        Raises:
            LaunchError: a grid would be larger than any device takes.
        """
        return Replay(self._launcher, self._device, self.source, self._handles, self._graphs, rows, eps, kept)


class Replay:
    """One plan for one row count and eps: called with addresses, as often as wanted and from several threads at once.

    Attributes:
        plan: what it replays.
        workspace_bytes: the scratch memory of a call, perhaps 0.
        handle: the address of lnl_replay, that of its argument `call`, and workspace_bytes, for callers that are no Python.
    """

    def __init__(self, launcher: Launcher, device: Device, source: Source, handles: dict[str, int],
                 graphs: Any, rows: int, eps: float, kept: frozenset[str]) -> None:
        self.plan = source.plan
        plan, problem, sms = source.plan, source.problem, device.limits.sms
        fields = pointer_fields(plan)
        sizes = {tensor.name: math.prod(tensor.shape(rows, problem.hidden, problem.out))
                 * ITEMSIZE[tensor.dtype(problem.dtype, problem.param_dtype)] for tensor in TENSORS}
        offsets, end = [], 0
        for buffer in plan.workspace:
            sizes[buffer.name] = buffer.bytes(rows, sms)
            offsets.append(end)
            end += -(-sizes[buffer.name] // ALIGNMENT) * ALIGNMENT
        self.workspace_bytes = end

        steps = []
        for step in plan.steps:
            if isinstance(step, Launch):
                grid = step.grid.evaluate(rows, sms)
                if grid > _MAX_GRID:
                    raise LaunchError(f"{step.kernel} asks for a grid of {grid} blocks; a GPU takes {_MAX_GRID}")
                steps.append(_Step(handles[step.kernel], grid, step.block, step.shared_bytes, 0, 0, step.overlaps))
            else:
                steps += [_Step(None, 0, 0, 0, fields.index(name), sizes[name], 0) for name in step.names if name not in kept]
        parameters = pack(plan, {"rows": rows, "eps": eps, "splits": plan.splits.evaluate(rows, sms)})
        self._launcher, self._replay, self._graphs = launcher, launcher.replay, graphs
        whole = all(step.function and step.grid for step in steps)  # then the steps are the plan's launches, all of them
        self._call = _Call(
            ctypes.pointer(launcher.functions), device.context, (_Step * len(steps))(*steps),
            (ctypes.c_size_t * len(offsets))(*offsets), parameters,
            ctypes.addressof(graphs) if whole and graphs is not None else None,
            len(steps), len(BY_NAME), len(offsets), len(parameters))
        self.handle = launcher.address, ctypes.addressof(self._call), self.workspace_bytes

    def __call__(self, tensors: Sequence[int], workspace: int, stream: int) -> None:
        """Enqueues the call on a stream of the device, and waits for nothing.

        Args:
            tensors: the addresses of TENSOR_FIELDS, 0 for those that are not there.
            workspace: the address of `workspace_bytes` bytes, a multiple of ALIGNMENT.
            stream: the handle of the stream.

        Raises:
            LaunchError: the driver refused it.
        """
        status = self._replay(self.handle[1], _pack(*tensors), workspace, stream)
        if status != 0:
            raise self.fault(status)

    def fault(self, status: int) -> LaunchError:
        """What to raise where lnl_replay returned that."""
        return LaunchError(f"the GPU refused the work: {self._launcher.driver.words(status)}")


_pack = struct.Struct(f"{len(TENSOR_FIELDS)}P").pack
