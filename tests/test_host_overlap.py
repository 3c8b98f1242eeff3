"""Launches that overlap, on the host: what a kernel may do before it has waited for the one before it."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.host_laws import ORDERS, PARAMS, kernel_text
from tuner.errors import LaunchError
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels

SIZE = 64
X = range(1, SIZE + 1)

BROKEN = {
    "reads_too_early": (
        "float y = p.y[threadIdx.x];\nwait_for_launch_before();\np.y[threadIdx.x] = y + 1.0f;",
        "thread 0: reads element 0 of y before it has waited for the launch before it"),
    "writes_too_early": (
        "p.y[threadIdx.x] = 1.0f;\nwait_for_launch_before();",
        "thread 0: writes element 0 of y before it has waited for the launch before it"),
    "some_do_not_wait": (
        "if (threadIdx.x < 32) wait_for_launch_before();\n__syncthreads();\np.y[threadIdx.x] = 1.0f;",
        "leaves the kernel without having waited for the launch before it"),
}
"""Kernels that are wrong where they overlap with another, and a part of the sentence that says so."""

KEPT = {
    "reads_inputs_early": "float x = p.x[threadIdx.x];\nwait_for_launch_before();\np.y[threadIdx.x] += x;",
    "lets_begin": "let_next_launch_begin();\nfloat x = p.x[threadIdx.x];\np.y[threadIdx.x] = x;",
}


@pytest.fixture(scope="module")
def kernels(host_executor: HostExecutor) -> Kernels:
    bodies = {name: body for name, (body, _) in BROKEN.items()} | KEPT
    return host_executor.load(PARAMS + "".join(kernel_text(*item) for item in bodies.items()), tuple(bodies))


def launched(kernels: Kernels, name: str, overlaps: bool, order: str = "forward", grid: int = 1) -> list[float]:
    """y, which held ones, after one kernel on x = 1..64."""
    with kernels.memory() as memory:
        x = memory.add_input("x", np.arange(1, SIZE + 1, dtype=np.float32))
        y = memory.add_output("y", (SIZE,))
        memory.fill("y", 1.0)
        kernels.launch(name, grid=grid, block=SIZE, params=struct.pack("<QQQq", x, y, 0, SIZE), memory=memory, overlaps=overlaps,
                       order=order)
        return [float(value) for value in memory.read("y")]


@pytest.mark.parametrize("name", BROKEN)
def test_what_it_does_too_early_is_named(name: str, kernels: Kernels) -> None:
    with pytest.raises(LaunchError) as caught:
        launched(kernels, name, overlaps=True)
    assert BROKEN[name][1] in str(caught.value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BROKEN)
def test_it_is_seen_in_every_order(name: str, order: str, kernels: Kernels) -> None:
    with pytest.raises(LaunchError, match=f"^kernel {name}"):
        launched(kernels, name, overlaps=True, order=order)


@pytest.mark.parametrize("name", BROKEN)
def test_it_may_do_so_where_it_does_not_overlap(name: str, kernels: Kernels) -> None:
    launched(kernels, name, overlaps=False)


@pytest.mark.parametrize("order", ORDERS)
def test_each_block_waits(order: str, kernels: Kernels) -> None:
    assert launched(kernels, "reads_inputs_early", overlaps=True, order=order, grid=2) == [1.0 + 2.0 * x for x in X]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch_after_it_finds_all_memory_again(overlaps: bool, kernels: Kernels) -> None:
    with pytest.raises(LaunchError):
        launched(kernels, "reads_too_early", overlaps=True)
    assert launched(kernels, "reads_inputs_early", overlaps) == [1.0 + x for x in X]
    assert launched(kernels, "lets_begin", overlaps=False) == [float(x) for x in X]
