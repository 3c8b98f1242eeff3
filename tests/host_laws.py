"""Laws of the host executor as data: a kernel that breaks one and the sentence that says so, and a sibling that keeps it."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tuner.errors import LaunchError
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels, Layout

SHARED = 256  # bytes of dynamic shared memory unless a law says otherwise
ORDERS = ("forward", "reverse", "shuffled:1", "shuffled:2", "shuffled:3")

Run = Callable[..., NDArray[np.float32]]
"""Launches a kernel by name, with `block`, `grid`, `shared`, `layout` and `order`."""


PARAMS = "struct Params { const float* x; float* y; const float* none; int64_t n; };\n"
"""Of tests whose kernels have one input and one output."""


def kernel_text(name: str, body: str) -> str:
    """A kernel whose body's first line is line 1."""
    head = f'extern "C" __global__ void __launch_bounds__(1024) {name}(const __grid_constant__ Params p) {{\n#line 1\n'
    return f"{head}{body}\n}}\n"


@dataclass(frozen=True)
class Law:
    """`broken` must fail with the sentence `says`, `kept` must run; both are bodies of kernels, launched alike."""

    name: str
    broken: str
    kept: str
    says: str
    block: int = 64
    layout: Layout = "end"
    shared: int = SHARED


def load_laws(executor: HostExecutor, params: str, laws: Iterable[Law], lawful: dict[str, str]) -> Kernels:
    """Both kernels of every law and the bodies of `lawful`, compiled at once; `params` declares struct Params."""
    bodies = {f"{law.name}_{kind}": body for law in laws for kind, body in (("broken", law.broken), ("kept", law.kept))}
    bodies |= lawful
    return executor.load(params + "".join(kernel_text(*item) for item in bodies.items()), tuple(bodies))


def runner(kernels: Kernels, size: int, block: int = 64) -> Run:
    """What runs a kernel with PARAMS on x = 1..size and gives y, which held NaN before; n is the size unless a call says so."""
    def run_kernel(name: str, *, block: int = block, grid: int = 1, shared: int = SHARED, layout: Layout = "end",
                   order: str = "forward", n: int = size) -> NDArray[np.float32]:
        with kernels.memory(layout) as memory:
            x = memory.add_input("x", np.arange(1, size + 1, dtype=np.float32))
            y = memory.add_output("y", (size,))
            kernels.launch(name, grid=grid, block=block, params=struct.pack("<QQQq", x, y, 0, n), memory=memory,
                           shared_bytes=shared, order=order)
            return memory.read("y")

    return run_kernel


def law_fixtures(params: str, laws: Iterable[Law], lawful: dict[str, str], size: int, block: int = 64) -> tuple[Any, Any]:
    """The fixtures `kernels`, all kernels of a file, and `run`, what launches one; see load_laws and runner."""
    @pytest.fixture(scope="module")
    def kernels(host_executor: HostExecutor) -> Kernels:
        return load_laws(host_executor, params, laws, lawful)

    @pytest.fixture
    def run(kernels: Kernels) -> Run:
        return runner(kernels, size, block)

    return kernels, run


def law_tests(laws: Sequence[Law]) -> type:
    """The tests of these laws, for a name that begins with Test. The module has a fixture `run`: what launches a law's kernel."""
    each = pytest.mark.parametrize("law", laws, ids=lambda law: law.name)

    class Laws:
        @each
        def test_broken_law_is_named(self, law: Law, run: Run) -> None:
            """The broken kernel fails with the law's sentence."""
            with pytest.raises(LaunchError) as caught:
                run(f"{law.name}_broken", block=law.block, layout=law.layout, shared=law.shared)
            kernel = f"kernel {law.name}_broken"
            expected = f"{kernel}, {law.says}" if law.says.startswith("block") else f"{kernel}: {law.says}"
            assert _any_type(str(caught.value)) == _any_type(expected)

        @pytest.mark.parametrize("order", ORDERS)
        @each
        def test_law_in_every_order(self, law: Law, order: str, run: Run) -> None:
            """In any order the broken kernel fails and the kept one runs."""
            with pytest.raises(LaunchError, match=f"^kernel {law.name}_broken"):
                run(f"{law.name}_broken", block=law.block, layout=law.layout, shared=law.shared, order=order)
            run(f"{law.name}_kept", block=law.block, layout=law.layout, shared=law.shared, order=order, grid=3)

    return Laws


def _any_type(sentence: str) -> str:
    """Compilers spell type names differently."""
    return re.sub("'[^']+'", "'...'", sentence)


def best_rate(work: int, run_once: Callable[[], object]) -> float:
    """Work per second of this thread's time in the fastest of several runs; the machine may be busy with other things."""
    rates = []
    for _ in range(7):
        begin = time.thread_time()
        run_once()
        rates.append(work / (time.thread_time() - begin))
    return max(rates)
