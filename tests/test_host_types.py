"""Tensors and scratch buffers of every data type on the host executor: contents, fences, poison, and what messages count in."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.expr import const
from codegen.plan import Launch, Plan
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import Source
from codegen.space import make_config
from tests.cases import DATA_TYPES
from tuner.dtypes import NUMPY, as_bytes, same_bits
from tuner.errors import LaunchError
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels, Layout
from tuner.inputs import random_inputs

SIZE = 61  # elements of x and y: a multiple of nothing
CXX = {"float32": "float", "bfloat16": "unsigned short", "float16": "unsigned short", "uint8": "unsigned char", "int32": "int"}
SHORT = ["bfloat16", "float16", "uint8"]

PARAMS = "struct Params { const void* x; void* y; int64_t from; int64_t to; };\n"


def kernel_text(cxx: str) -> str:
    """Copies element `from` of x to element `to` of y; without a `to`, all of x."""
    name = f"copy_{cxx.replace(' ', '_')}"
    return (f'extern "C" __global__ void __launch_bounds__(1024) {name}(const __grid_constant__ Params p) {{\n'
            f"const {cxx}* x = static_cast<const {cxx}*>(p.x);\n{cxx}* y = static_cast<{cxx}*>(p.y);\n"
            f"if (p.to == {2 * SIZE}) {{ if (threadIdx.x < {SIZE}) y[threadIdx.x] = x[threadIdx.x]; }}\n"
            "else if (threadIdx.x == 0) y[p.to] = x[p.from];\n}\n")


LEFT_BEHIND = (
    'extern "C" __global__ void __launch_bounds__(1024) left_behind(const __grid_constant__ Params p) {\n'
    "unsigned short* s = reinterpret_cast<unsigned short*>(dynamic_shared());\n"
    "static_cast<unsigned short*>(p.y)[blockIdx.x] = s[p.from];\ns[p.from] = 0x3c00;\n}\n")


@pytest.fixture(scope="module")
def kernels(host_executor: HostExecutor) -> Kernels:
    types = tuple(dict.fromkeys(CXX.values()))
    names = tuple(f"copy_{cxx.replace(' ', '_')}" for cxx in types)
    return host_executor.load(PARAMS + "".join(kernel_text(cxx) for cxx in types) + LEFT_BEHIND, (*names, "left_behind"))


Run = Callable[..., NDArray[Any]]


@pytest.fixture
def run(kernels: Kernels) -> Run:
    """Runs the kernel of a type on x = 1..SIZE, and gives y."""

    def run_kernel(dtype: str, source: int = 0, to: int = 2 * SIZE, layout: Layout = "end",
                   fill: float | None = None) -> NDArray[Any]:
        with kernels.memory(layout) as memory:
            x = memory.add_input("x", np.arange(1, SIZE + 1).astype(NUMPY[dtype]))
            y = memory.add_output("y", (SIZE,), NUMPY[dtype])
            if fill is not None:
                memory.fill("y", fill)
            kernels.launch(f"copy_{CXX[dtype].replace(' ', '_')}", grid=1, block=64, memory=memory,
                           params=struct.pack("<QQqq", x, y, source, to))
            return memory.read("y")

    return run_kernel


@pytest.mark.parametrize("layout", ["end", "begin"])
@pytest.mark.parametrize("dtype", CXX)
def test_n9_every_element_type_goes_there_and_back(run: Run, dtype: str, layout: Layout) -> None:
    y = run(dtype, layout=layout)
    assert y.dtype == NUMPY[dtype]
    np.testing.assert_array_equal(y.astype(np.float64), np.arange(1, SIZE + 1))


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("source", "to", "layout", "says"), [
    (SIZE, 0, "end", f"reads element {SIZE} of x, which has {SIZE} elements"),
    (0, SIZE, "end", f"writes element {SIZE} of y, which has {SIZE} elements"),
    (-1, 0, "begin", f"reads element -1 of x, which has {SIZE} elements"),
    (0, -1, "begin", f"writes element -1 of y, which has {SIZE} elements"),
    (0x7FED7FED, 0, "end", f"reads element {0x7FED7FED} of x, which has {SIZE} elements"),
])
def test_short_elements_end_directly_before_the_fence(run: Run, dtype: str, source: int, to: int, layout: Layout,
                                                      says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        run(dtype, source, to, layout)
    assert str(caught.value).endswith(says)


@pytest.mark.parametrize("dtype", SHORT)
def test_one_short_element_written_beside_a_buffer_is_seen(run: Run, dtype: str) -> None:
    with pytest.raises(LaunchError, match="some thread writes just after the last element of y"):
        run(dtype, 0, SIZE, "begin")
    with pytest.raises(LaunchError, match="some thread writes just before the first element of y"):
        run(dtype, 0, -1, "end")


@pytest.mark.parametrize("fill", [None, float("nan")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["end", "begin"])
def test_what_nothing_has_written_is_nan_to_the_last_element(run: Run, dtype: str, fill: float | None, layout: Layout) -> None:
    y = run(dtype, 6, 0, layout, fill).astype(np.float64)
    assert y[0] == 7.0 and np.isnan(y[1:]).all()


def test_shared_memory_of_any_size_is_nan_in_every_block(kernels: Kernels) -> None:
    with kernels.memory() as memory:
        y = memory.add_output("y", (3,), NUMPY["float16"])
        kernels.launch("left_behind", grid=3, block=1, params=struct.pack("<QQqq", 0, y, 4, 0), memory=memory, shared_bytes=10)
        assert np.isnan(memory.read("y")).all()


@pytest.mark.parametrize("dtype", CXX)
def test_every_element_type_can_be_filled(run: Run, dtype: str) -> None:
    y = run(dtype, 0, 0, fill=7.0).astype(np.float64)
    assert y[0] == 1.0 and (y[1:] == 7.0).all()


def test_an_unset_whole_number_is_no_index(run: Run) -> None:
    assert (4 * run("int32", 0, 0)[1:].astype(np.int64) > 1 << 32).all()


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
def test_n9_a_program_takes_its_own_data_types_only(host_executor: HostExecutor, dtype: str, param_dtype: str) -> None:
    text = PARAMS.replace("int64_t from", "void* more[10]; int64_t from").replace("int64_t to", "float eps; int splits") + (
        'extern "C" __global__ void nothing(const __grid_constant__ Params p) {}\n')
    problem = Problem(5, 8, 3, dtype, param_dtype=param_dtype)
    program = host_executor.compile(Source(problem, make_config("row_thread"), text, Plan((Launch("nothing", const(1), 32),))))
    for given in DATA_TYPES:
        inputs = random_inputs(5, 8, 3, dtype=given[0], param_dtype=given[1])
        if given == (dtype, param_dtype):
            got = program.run(inputs, ALL_GRADIENTS, prefill=3.0)
            assert {name: array.dtype.name for name, array in got.present().items()} == {
                "dx": dtype, "dgamma": param_dtype, "dbeta": param_dtype, "dw": param_dtype, "db": param_dtype}
            assert all((array == 3.0).all() for array in got.present().values())
        else:
            with pytest.raises(LaunchError, match=r"^the kernel is for "):
                program.run(inputs, ALL_GRADIENTS)


def test_bits_are_compared_not_values() -> None:
    nan = np.array([np.nan, 1.0, 0.0], np.float32)
    assert same_bits(nan, nan.copy()) and not same_bits(nan, -nan)
    for dtype in ("bfloat16", "float16", "uint8"):
        for size in (0, 1, 2, 3, 4, 9):
            first = np.arange(size).astype(NUMPY[dtype])
            other = first.copy()
            assert same_bits(first, other) and as_bytes(first).nbytes == first.nbytes
            if size:
                as_bytes(other)[-1] ^= 0x80
                assert not same_bits(first, other)
