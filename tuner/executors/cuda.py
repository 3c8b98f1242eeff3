"""The CUDA executor: rendered sources compiled by nvcc, run and timed on the GPU of this machine through PyCUDA."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codegen.limits import Limits
from codegen.params import pack
from codegen.plan import Fill, Launch
from codegen.render import Source
from tuner.errors import LaunchError
from tuner.executors import Run, Timing
from tuner.executors.arrays import check_dtypes, output_specs, workspace_specs
from tuner.executors.cuda_context import Gpu, Module, open_gpu
from tuner.executors.cuda_graph import CudaStream
from tuner.executors.cuda_limits import architecture, known, read_limits, slug
from tuner.executors.cuda_memory import Memory, Placed
from tuner.inputs import Gradients, Inputs
from tuner.store import Store
from tuner.timing.clocks import Clocks
from tuner.timing.measure import BY_REGIME, FLUSH_L2S, Effort, Work, back_to_back
from tuner.timing.regimes import Regime
from tuner.toolchain import Binary, find_nvcc

MAX_GRID = 2**31 - 1
"""Largest grid.x; "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide."""

_EMPTY_KERNEL = 'extern "C" __global__ void empty(int) {}\n'
_COPY_BYTES = 2 << 30  # many times any L2 cache


class CudaExecutor:
    """Compiles sources for one GPU of this machine. Thread-safe; the GPU does one thing at a time.

    Attributes:
        name: "cuda".
        measures: True.
        device: the driver's name of the GPU: "NVIDIA H200".
        slug: the same as a folder name: "h200".
        limits: read from the device.
        rates: where `limits.copy_tbps` and `limits.launch_us` are from: "table" where the table of targets has this very GPU,
            else "measured" when the executor was made.
        bus_id: the GPU's PCI address, by which NVML finds it.

    Args:
        device_index: which GPU, from 0.
        store: where compiled kernels are kept; None: the default store.
        limits: where another executor for this GPU has found them out, so that they are the same here.
        memory: how tensors are placed.

    Raises:
        ToolchainError: there is no such GPU, no PyCUDA or no nvcc, or nvcc does not know the GPU.
    """

    name = "cuda"
    measures = True

    def __init__(self, device_index: int = 0, store: Store | None = None, limits: Limits | None = None,
                 memory: Callable[[Gpu], Memory] = Memory) -> None:
        self._gpu = open_gpu(device_index)
        self._arch = architecture(self._gpu.compute_capability)
        self._nvcc = find_nvcc(self._arch)
        self._store = Store() if store is None else store
        self._memory = memory(self._gpu)
        self._timer = Timer(self._gpu)
        self.device = self._gpu.name
        self.bus_id: str | None = self._gpu.bus_id
        self.slug = slug(self.device)
        table = known(self.device, self._gpu.compute_capability, self._gpu.attribute("MULTIPROCESSOR_COUNT"))
        self.rates: Literal["table", "measured"] = "measured" if table is None else "table"
        self.limits: Limits = limits or read_limits(
            self.device, self._gpu.compute_capability, self._gpu.attribute,
            copy_tbps=self.measure_copy_tbps() if table is None else table.copy_tbps,
            launch_us=self.measure_launch_us() if table is None else table.launch_us)

    def compile(self, source: Source) -> CudaProgram:
        """As Executor.compile. The GPU is not touched; what it refuses to load is a LaunchError of the first run."""
        binary = self._nvcc.compile(source.text, self._arch, self._store)
        return CudaProgram(source, binary, self._gpu, self._memory, self._timer, self.limits)

    def close(self) -> None:
        """Gives back the GPU memory that calls left behind. The executor stays usable."""
        if self._gpu.alive:
            with self._gpu.active():
                self._memory.free()

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """In the block, and only there, a profiler that this process runs under counts."""
        with self._gpu.active():
            self._gpu.driver.start_profiler()
            try:
                yield
            finally:
                self._gpu.driver.stop_profiler()

    def measure_launch_us(self) -> float:
        """Time of an empty kernel, one of many replayed from a graph, in microseconds.

        Raises:
            CompileError, ToolchainError, LaunchError: as compile and run.
        """
        binary = self._nvcc.compile(_EMPTY_KERNEL, self._arch, self._store)
        with self._gpu.active():
            module = Module(self._gpu, binary.cubin.read_bytes(), {"empty": 0})
            launch = functools.partial(module.launch, "empty", grid=1, block=32, shared_bytes=0, params=bytes(4))
            return self._timer.time(launch, Effort(50, 0.1), "warm").median

    def measure_copy_tbps(self) -> float:
        """Rate of a large copy on the device, bytes read plus bytes written, in TB/s.

        Raises:
            LaunchError: the GPU has not enough memory, or fails.
        """
        driver, stream = self._gpu.driver, self._timer.stream
        size = min(_COPY_BYTES, self._gpu.memory_bytes // 8)
        with self._gpu.active():
            source, destination = driver.mem_alloc(size), driver.mem_alloc(size)
            try:
                driver.memset_d32_async(source, 0x3F9D70A4, size // 4, self._gpu.stream)
                copy = functools.partial(driver.memcpy_dtod_async, destination, source, size, self._gpu.stream)
                # Large, and not from a graph: 512 MiB from one gave 2.75 TB/s on an H200, where this agrees with the table.
                microseconds = min(back_to_back(stream, copy, 10))
            finally:
                source.free()
                destination.free()
        return 2e-6 * size / microseconds


class Timer:
    """Times work on one GPU in each regime, with its clocks warmed. Use it inside `Gpu.active`.

    Attributes:
        stream: where the work goes.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.stream = CudaStream(gpu, FLUSH_L2S * gpu.attribute("L2_CACHE_SIZE"))
        self._gpu = gpu
        self._clocks = Clocks()

    def time(self, work: Work, effort: Effort, regime: Regime) -> Timing:
        """Times of what `work` enqueues."""
        try:
            return BY_REGIME[regime](self.stream, work, effort, self._clocks)
        finally:
            if self._gpu.alive:
                self.stream.free()


class CudaProgram:
    """A compiled source, ready to run on any row count; loaded at its first run.

    Attributes:
        resources: what nvcc says each kernel uses.
        variations: none; the order in which a GPU works cannot be chosen.
    """

    def __init__(self, source: Source, binary: Binary, gpu: Gpu, memory: Memory, timer: Timer, limits: Limits) -> None:
        self.resources = binary.resources(source.plan)
        self._source = source
        self._cubin: Path = binary.cubin
        self._gpu = gpu
        self._memory = memory
        self._timer = timer
        self._limits = limits
        self._module: Module | None = None
        self._loading = threading.Lock()
        self.variations: dict[str, Run] = {}

    def run(self, inputs: Inputs, wants: frozenset[str], *, prefill: float = math.nan) -> Gradients:
        """One call. Gradients that are not in `wants` are None.

        Args:
            prefill: what outputs and workspace hold before the call.

        Raises:
            LaunchError: a launch failed or is beyond the device, or the kernel wrote outside its outputs or into its inputs.
        """
        with self._on_device(inputs, wants) as call:
            for placed in (call.outputs, call.workspace):
                for name in placed.layout.spans:
                    placed.fill(name, prefill)
            call.enqueue()
            image, workspace_zones = call.outputs.fetch(), call.workspace.fetch_zones()
            self._gpu.stream.synchronize()
            fault = call.outputs.damage(call.outputs.zones_of(image)) or call.workspace.damage(workspace_zones)
            if fault is not None:
                raise LaunchError(f"the kernel {fault}")
            self._memory.check_inputs(inputs, call.inputs)
        layout = call.outputs.layout
        return Gradients(**{name: layout.tensor(image, name) for name in layout.spans})

    def execute(self, inputs: Inputs, wants: frozenset[str]) -> None:
        """One call of which nothing is looked at, and before which nothing but the inputs is set: for tools that watch memory.

        Raises:
            LaunchError: a launch failed or is beyond the device.
        """
        with self._on_device(inputs, wants) as call:
            call.enqueue()
            self._gpu.stream.synchronize()

    def time(self, inputs: Inputs, wants: frozenset[str], *, samples: int = 20, budget_s: float = 0.2,
             regime: Regime = "warm") -> Timing:
        """Times of one call on these inputs, all fills and launches of the plan, after the clocks are stable.

        Args:
            samples: how many, if they fit into the budget.
            budget_s: about how long the GPU may take; a call that takes longer still gives one sample.
            regime: as tuner.timing.regimes says.

        Raises:
            LaunchError: the call cannot be captured or fails, or there is not enough memory to write over the L2 cache.
        """
        with self._on_device(inputs, wants) as call:
            return self._timer.time(call.enqueue, Effort(samples, budget_s), regime)

    @contextmanager
    def _on_device(self, inputs: Inputs, wants: frozenset[str]) -> Iterator[Call]:
        """One call with all it needs on the device, for the length of a block, inside `Gpu.active`.

        Raises:
            LaunchError: the call is beyond the device, or what is done in the block fails.
        """
        try:
            with self._gpu.active():
                yield self._prepare(inputs, wants)
        finally:
            if self._gpu.alive:
                with self._gpu.active():
                    self._memory.release(inputs)

    def _prepare(self, inputs: Inputs, wants: frozenset[str]) -> Call:
        """Everything a call needs on the device; inside `Gpu.active`."""
        problem, plan = self._source.problem, self._source.plan
        if (inputs.hidden, inputs.out) != (problem.hidden, problem.out):
            raise LaunchError(f"the kernel is for hidden={problem.hidden} and out={problem.out}, "
                              f"not for {inputs.hidden} and {inputs.out}")
        check_dtypes(problem, inputs)
        if missing := sorted(wants - problem.wants):
            raise LaunchError(f"the kernel computes {problem.wants_key} only, not {missing[0]}")
        rows, sms = inputs.rows, self._limits.sms
        grids = tuple(step.grid.evaluate(rows, sms) if isinstance(step, Launch) else 0 for step in plan.steps)
        for launch in plan.launches:
            self._check(launch, launch.grid.evaluate(rows, sms))
        placed = self._memory.place(inputs, output_specs(inputs, wants), workspace_specs(plan, rows, sms))
        values: dict[str, int | float] = {"rows": rows, "eps": inputs.eps, "splits": plan.splits.evaluate(rows, sms)}
        for tensors in placed:
            values |= tensors.addresses
        return Call(*placed, self._loaded(), tuple(zip(plan.steps, grids, strict=True)), pack(plan, values))

    def _check(self, launch: Launch, grid: int) -> None:
        limits = self._limits
        for what, asked, allowed in (
                ("a grid of {} blocks", grid, MAX_GRID), ("blocks of {} threads", launch.block, limits.max_threads),
                ("{} bytes of shared memory a block", launch.shared_bytes, limits.shared_per_block)):
            if asked > allowed:
                raise LaunchError(f"{launch.kernel} asks for {what.format(asked)}; {limits.name} allows {allowed}")

    def _loaded(self) -> Module:
        with self._loading:
            if self._module is None:
                shared: dict[str, int] = {}
                for launch in self._source.plan.launches:
                    shared[launch.kernel] = max(launch.shared_bytes, shared.get(launch.kernel, 0))
                overlapping = {launch.kernel for launch in self._source.plan.launches if launch.overlaps}
                self._module = Module(self._gpu, self._cubin.read_bytes(), shared, overlapping)
            return self._module


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """One call on tensors in place. `enqueue` may be repeated, and captured."""

    inputs: Placed
    outputs: Placed
    workspace: Placed
    module: Module
    steps: tuple[tuple[Fill | Launch, int], ...]
    params: bytes

    def enqueue(self) -> None:
        """Puts the plan's steps on the stream."""
        launched = False  # the step before, so that there is something of the call's to overlap with
        for step, grid in self.steps:
            if isinstance(step, Launch):
                if grid > 0:
                    self.module.launch(step.kernel, grid=grid, block=step.block, shared_bytes=step.shared_bytes,
                                       params=self.params, overlaps=step.overlaps and launched)
                launched = grid > 0
                continue
            for name in step.names:
                self._zero(name)

    def _zero(self, name: str) -> None:
        for placed in (self.outputs, self.workspace):
            if name in placed.layout.spans:
                placed.zero(name)
