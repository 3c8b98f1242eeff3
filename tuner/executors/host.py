"""The host executor: rendered sources run on the CPU, under laws stricter than a GPU's. It is for truth, not for speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from codegen.limits import Limits
from codegen.params import pack
from codegen.plan import Fill, Launch
from codegen.render import Source
from codegen.tensors import OUTPUTS, READ
from tuner.dtypes import same_bits
from tuner.errors import LaunchError
from tuner.executors import Resources, Run
from tuner.executors.arrays import check_dtypes, output_specs, workspace_specs
from tuner.executors.host_runtime import Kernels, Layout, Memory, load_runtime
from tuner.executors.host_toolchain import Compiler, build_kernels, build_runtime, find_compiler
from tuner.inputs import AnyFloats, Gradients, Inputs
from tuner.store import Store


class HostExecutor:
    """Compiles sources with the C++ compiler of this machine and runs them on fibers.

    Attributes:
        name: "host".
        device: "host (g++ 12.2)".
        slug: "predicted-sm_90": under what GPU's name its results are kept.
        measures: False.
        rates: "table".
        bus_id: None.
        limits: of the GPU the sources are meant for; launches beyond them fail as they would there.

    Args:
        target: those limits.
        store: where compiled kernels are kept.
        compiler: None: $CXX, or the first that is found.

    Raises:
        ToolchainError: there is no C++ compiler, or the store cannot be written.
        CompileError: the compiler refuses the runtime itself.
    """

    name = "host"
    measures = False
    rates: Literal["table", "measured"] = "table"
    bus_id: str | None = None

    def __init__(self, target: Limits, store: Store, compiler: Compiler | None = None) -> None:
        self.limits = target
        self.slug = f"predicted-{target.arch.removesuffix('a')}"
        self._store = store
        self._compiler = find_compiler() if compiler is None else compiler
        self.device = f"host ({self._compiler.label})"
        self._files = build_runtime(self._compiler, store)
        self._runtime = load_runtime(self._files.digest, self._files.library)

    def build(self, source: Source) -> None:
        """Compiles into the store, and loads nothing: for a process that runs no kernel. Thread-safe; raises as `load`."""
        self._build(source.text, _kernels(source))

    def load(self, text: str, kernels: Sequence[str]) -> Kernels:
        """Compiles any CUDA source of the form that `build_kernels` describes. Thread-safe.

        Raises:
            CompileError: the compiler refused the source.
            ToolchainError: the compiler cannot be started, or the store cannot be written.
        """
        return Kernels(self._runtime, self._build(text, kernels), max_threads=self.limits.max_threads,
                       max_shared_bytes=self.limits.shared_per_block)

    def _build(self, text: str, kernels: Sequence[str]) -> Path:
        return build_kernels(self._compiler, self._store, self._files, text, kernels, fma=self._runtime.has_fma)

    def compile(self, source: Source) -> HostProgram:
        """As Executor.compile."""
        return HostProgram(source, self.load(source.text, _kernels(source)), self.limits.sms)

    def close(self) -> None:
        """Nothing is kept from one call to the next."""


def _kernels(source: Source) -> tuple[str, ...]:
    return tuple(dict.fromkeys(launch.kernel for launch in source.plan.launches))


class HostProgram:
    """A compiled source. Several threads may run it at once.

    Attributes:
        resources: empty; the CPU's compiler knows nothing of a GPU's registers.
        variations: the other memory layouts, and other orders of blocks and threads.
    """

    def __init__(self, source: Source, kernels: Kernels, sms: int) -> None:
        self._problem = source.problem
        self._plan = source.plan
        self._kernels = kernels
        self._sms = sms
        self.resources: dict[str, Resources] = {}
        self.variations: dict[str, Run] = {
            "each buffer directly after a fence, blocks and threads in reverse order":
                partial(self.run, layout="begin", order="reverse"),
            "tensors at addresses that are multiples of one element only, blocks and threads in a random order":
                partial(self.run, layout="shifted", order="shuffled:1"),
        }

    def run(self, inputs: Inputs, wants: frozenset[str], *, prefill: float = math.nan, order: str = "forward",
            layout: Layout = "end") -> Gradients:
        """One call. Gradients that are not in `wants` are None.

        Args:
            prefill: what outputs and workspace hold before the call.
            order: of blocks and threads: "forward", "reverse" or "shuffled:<seed>". A kernel without races gives the same
                result in each, but for atomic additions, whose roundings follow the order.
            layout: which end of every buffer lies against its fence: "end" or "begin". The two together find every access
                outside of a buffer. "shifted": no tensor begins at a multiple of more than its elements' size.

        Raises:
            LaunchError: a kernel broke a law of cuda_on_host; the message names kernel, block and thread.
        """
        check_dtypes(self._problem, inputs)
        rows = inputs.rows
        with self._kernels.memory(layout) as memory:
            given = {name: array for name in READ if (array := getattr(inputs, name)) is not None}
            for name, array in given.items():
                memory.add_input(name, array)
            written = output_specs(inputs, wants) | workspace_specs(self._plan, rows, self._sms)
            for name, spec in written.items():
                memory.add_output(name, spec.shape, spec.dtype)
                memory.fill(name, prefill)
            splits = self._plan.splits.evaluate(rows, self._sms)
            params = pack(self._plan, {**memory.addresses, "rows": rows, "eps": inputs.eps, "splits": splits})
            launched = False
            for step in self._plan.steps:
                if isinstance(step, Fill):
                    for name in step.names:
                        if name in memory.addresses:
                            memory.fill(name, 0.0)
                else:
                    launched = self._launch(step, rows, params, memory, order, launched)
            _check_unchanged(given, memory)
            return Gradients(**{name: memory.read(name) if name in wants else None for name in OUTPUTS})

    def _launch(self, step: Launch, rows: int, params: bytes, memory: Memory, order: str, launched: bool) -> bool:
        """Whether there were blocks to run. `launched`: whether the step before has just run, so that there is what to overlap
        with."""
        grid = step.grid.evaluate(rows, self._sms)
        if grid == 0:
            return False
        self._kernels.launch(step.kernel, grid=grid, block=step.block, params=params, memory=memory,
                             shared_bytes=step.shared_bytes, overlaps=step.overlaps and launched, order=order)
        return True


def _check_unchanged(given: dict[str, AnyFloats], memory: Memory) -> None:
    for name, array in given.items():
        if not same_bits(memory.read(name), array):
            raise LaunchError(f"the input {name} was changed")
