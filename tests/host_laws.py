"""Laws of the host executor as data: a kernel that breaks one and the sentence that says so, and a sibling that keeps it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from tuner.errors import LaunchError
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels, Layout

SHARED = 256  # bytes of dynamic shared memory unless a law says otherwise
ORDERS = ("forward", "reverse", "shuffled:1", "shuffled:2", "shuffled:3")


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


def check_sentence(law: Law, run: Callable[..., object]) -> None:
    """The broken kernel fails with the law's sentence. `run(kernel, block=, layout=, shared=)` launches."""
    with pytest.raises(LaunchError) as caught:
        run(f"{law.name}_broken", block=law.block, layout=law.layout, shared=law.shared)
    kernel = f"kernel {law.name}_broken"
    expected = f"{kernel}, {law.says}" if law.says.startswith("block") else f"{kernel}: {law.says}"
    assert _any_type(str(caught.value)) == _any_type(expected)


def check_order(law: Law, run: Callable[..., object], order: str) -> None:
    """In any order the broken kernel fails and the kept one runs."""
    with pytest.raises(LaunchError, match=f"^kernel {law.name}_broken"):
        run(f"{law.name}_broken", block=law.block, layout=law.layout, shared=law.shared, order=order)
    run(f"{law.name}_kept", block=law.block, layout=law.layout, shared=law.shared, order=order, grid=3)


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
