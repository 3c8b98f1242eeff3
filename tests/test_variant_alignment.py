"""Tensors may begin at any element, whatever their rows would allow: views of larger tensors do."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from codegen.config import Config
from codegen.dtypes import ITEMSIZE
from codegen.problem import ALL_GRADIENTS
from tests.variant_cases import SMALL_SHAPE, compiled, every_config, fitted, problem_of, typed_configs
from tuner.compare import bound_fault
from tuner.executors.host import HostExecutor, HostProgram
from tuner.inputs import random_inputs


def check(executor: HostExecutor, config: Config, dtype: str, param_dtype: str) -> None:
    """Rows of both lengths are multiples of every vector, so nothing but the addresses keeps a kernel from wide accesses."""
    assert SMALL_SHAPE.hidden % 8 == SMALL_SHAPE.out % 8 == 0
    at = fitted(config, SMALL_SHAPE, dtype, param_dtype)
    assert at is not None
    inputs = random_inputs(SMALL_SHAPE.rows, SMALL_SHAPE.hidden, SMALL_SHAPE.out, dtype=dtype, param_dtype=param_dtype)
    problem = problem_of(at, inputs)
    program = cast(HostProgram, compiled(executor, problem, at))
    got = program.run(inputs, ALL_GRADIENTS, layout="shifted")
    assert bound_fault(inputs, got, ALL_GRADIENTS, problem.accuracy) is None


@every_config
def test_any_element_is_a_beginning(config: Config, host_executor: HostExecutor) -> None:
    check(host_executor, config, "float32", "float32")


@typed_configs
def test_any_element_is_a_beginning_in_every_data_type(config: Config, dtype: str, param_dtype: str,
                                                       host_executor: HostExecutor) -> None:
    check(host_executor, config, dtype, param_dtype)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_shifted_addresses_are_those_of_one_element(dtype: str, host_executor: HostExecutor) -> None:
    kernels = host_executor.load("struct Params { int64_t n; };\n"
                                 'extern "C" __global__ void nothing(const __grid_constant__ Params p) {}\n', ("nothing",))
    inputs = random_inputs(3, 8, 8, dtype=dtype, param_dtype=dtype)
    with kernels.memory("shifted") as memory:
        x = memory.add_input("x", inputs.x)
        dx = memory.add_output("dx", (3, 8), inputs.x.dtype)
        scratch = memory.add_output("scratch", (3, 8), np.dtype(np.float32))
        assert x % 256 == dx % 256 == ITEMSIZE[dtype] and scratch % 256 == 0
        assert memory.read("x").tobytes() == inputs.x.tobytes()
        assert memory.read("dx").shape == (3, 8)
