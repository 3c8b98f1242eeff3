"""Tensors and scratch buffers of every data type on the CUDA executor, on a stand-in for the driver (tests/fake_cuda.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from codegen.expr import ROWS, const
from codegen.plan import Buffer, Fill, Launch, Plan
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import Source
from codegen.space import make_config
from codegen.tensors import BY_NAME
from tests.cases import DATA_TYPES
from tests.fake_cuda import Arguments, FakeCuda, FakeKernel, open_executor, solve_in
from tuner.dtypes import NUMPY, POISON
from tuner.errors import LaunchError
from tuner.executors.arrays import Spec
from tuner.executors.cuda import CudaProgram
from tuner.executors.cuda_memory import ALIGNMENT, GUARD_BYTES, Layout
from tuner.inputs import random_inputs
from tuner.reference import reference
from tuner.store import Store

ROWS_RUN, HIDDEN, OUT = 5, 3, 7

Make = Callable[..., tuple[CudaProgram, FakeCuda]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, store: Store) -> Make:
    """A program of one launch of `kernel`, which the fake runs as the given function."""

    def program(kernel: FakeKernel = lambda given: None, *, plan: Plan | None = None, dtype: str = "float32",
                param_dtype: str = "") -> tuple[CudaProgram, FakeCuda]:
        fake = FakeCuda(kernels={"kernel": kernel})
        fake.plan = plan or Plan((Launch("kernel", const(1), 32),))
        text = 'extern "C" __global__ void kernel(float*) {}\n'
        problem = Problem(ROWS_RUN, HIDDEN, OUT, dtype, param_dtype=param_dtype)
        return open_executor(monkeypatch, store, fake).compile(Source(problem, make_config("row_thread"), text, fake.plan)), fake

    return program


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
@pytest.mark.parametrize("rows", [0, 1, ROWS_RUN])
def test_n9_every_data_type_goes_there_and_back(make: Make, dtype: str, param_dtype: str, rows: int) -> None:
    program, _ = make(solve_in(dtype, param_dtype, HIDDEN, OUT), dtype=dtype, param_dtype=param_dtype)
    inputs = random_inputs(rows, HIDDEN, OUT, dtype=dtype, param_dtype=param_dtype)
    got, right = program.run(inputs, ALL_GRADIENTS).present(), reference(inputs, ALL_GRADIENTS).present()
    for name, values in right.items():
        expected = values.astype(NUMPY[BY_NAME[name].dtype(dtype, param_dtype)])
        assert got[name].dtype == expected.dtype and got[name].flags.c_contiguous
        np.testing.assert_array_equal(got[name].astype(np.float64), expected.astype(np.float64), name)


def test_n9_inputs_of_other_data_types_than_the_kernel_are_refused(make: Make) -> None:
    program, fake = make(dtype="bfloat16", param_dtype="float32")
    for given in ("float32", "bfloat16"):
        with pytest.raises(LaunchError) as caught:
            program.run(random_inputs(5, HIDDEN, OUT, dtype=given), ALL_GRADIENTS)
        assert str(caught.value) == f"the kernel is for bfloat16 with float32 parameters, not for {given}"
    assert not fake.launches


@pytest.mark.parametrize(("dtype", "prefill"), [
    ("float32", math.nan), ("bfloat16", math.nan), ("float16", math.nan), ("bfloat16", 7.0), ("float16", 7.0), ("uint8", 7.0),
    ("int32", 7.0), ("int32", math.nan)])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_memory_of_every_element_type_is_filled_and_zeroed(make: Make, dtype: str, prefill: float, size: int) -> None:
    seen: list[list[float]] = []

    def look(given: Arguments) -> None:
        seen.append(given.array("partial", size, dtype=dtype).astype(np.float64).tolist())

    steps = (Launch("kernel", const(1), 32), Fill(("partial",)), Launch("kernel", const(1), 32))
    program, _ = make(look, plan=Plan(steps, (Buffer("partial", const(size), dtype),)))
    program.run(random_inputs(5, HIDDEN, OUT), frozenset(("db",)), prefill=prefill)
    before, after = seen
    assert after == [0.0] * size
    if dtype == "int32" and math.isnan(prefill):  # as an index it must lead out of every tensor
        assert all(4 * value > 1 << 32 for value in before)
    else:
        np.testing.assert_array_equal(before, [prefill] * size)


@pytest.mark.parametrize(("name", "at", "sentence"), [
    ("dx", 15, "the kernel wrote 0 bytes past the end of dx"),
    ("dx", 16, "the kernel wrote 2 bytes past the end of dx"),
    ("dgamma", -1, "the kernel wrote 2 bytes before the start of dgamma"),
    ("partial", 10, "the kernel wrote 0 bytes past the end of partial"),
    ("w", 21, "the kernel wrote 0 bytes past the end of w"),
    ("x", 14, "the kernel wrote into the input x"),
])
def test_one_16_bit_element_written_elsewhere_is_seen(make: Make, name: str, at: int, sentence: str) -> None:
    right = solve_in("bfloat16", "bfloat16", HIDDEN, OUT)

    def kernel(given: Arguments) -> None:
        right(given)
        given.array(name, 1, at=at, dtype="bfloat16")[0] = 1.0

    program, _ = make(kernel, plan=Plan((Launch("kernel", const(1), 32),), (Buffer("partial", ROWS * 2, "bfloat16"),)),
                      dtype="bfloat16")
    with pytest.raises(LaunchError) as caught:
        program.run(random_inputs(ROWS_RUN, HIDDEN, OUT, dtype="bfloat16"), ALL_GRADIENTS)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("dtype", "at", "clause"), [
    ("float32", 0, "wrote 0 bytes past the end of dx"), ("float32", 2, "wrote 8 bytes past the end of dx"),
    ("float32", -1, "wrote 4 bytes before the start of db"),
    ("bfloat16", 0, "wrote 0 bytes past the end of dx"), ("float16", 1, "wrote 2 bytes past the end of dx"),
    ("float16", -1, "wrote 2 bytes before the start of db"), ("bfloat16", -3, "wrote 6 bytes before the start of db"),
    ("uint8", 0, "wrote 0 bytes past the end of dx"), ("uint8", -1, "wrote 1 bytes before the start of db"),
])
def test_between_two_tensors_the_nearer_one_is_named(dtype: str, at: int, clause: str) -> None:
    element = NUMPY[dtype]
    layout = Layout({"dx": Spec((5, 3), element), "db": Spec((7,), element)})
    zone = layout.zones[1]
    image = np.full(layout.total_bytes // 4, POISON, np.uint32).view(np.uint8)
    held = image[zone.begin:zone.end]
    assert zone.damage(held) is None
    held.view(element)[at] = 1
    assert zone.damage(held) == clause


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("sizes", [{}, {"a": 0}, {"a": 1, "b": 0, "c": 1000}, {"a": 64, "b": 63, "c": 65}])
def test_tensors_and_zones_cover_the_allocation(sizes: dict[str, int], dtype: str) -> None:
    element = NUMPY[dtype]
    layout = Layout({name: Spec((size,), element) for name, size in sizes.items()})
    spans = [*layout.spans.values(), *((zone.begin, zone.end) for zone in layout.zones)]
    assert [end - begin for begin, end in layout.spans.values()] == [size * element.itemsize for size in sizes.values()]
    assert sum(end - begin for begin, end in spans) == layout.total_bytes
    assert layout.total_bytes % 4 == 0
    covered = sorted(span for span in spans if span[0] < span[1])
    assert all(left[1] == right[0] for left, right in pairwise(covered))
    assert all(zone.end - zone.begin >= GUARD_BYTES for zone in layout.zones)
    assert all(begin % ALIGNMENT == 0 for begin, _ in layout.spans.values())
