"""Every variant's sums: of every width, in any order of threads, repeated, and on outputs that hold something already."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from codegen.config import Config, Value
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem, Shape
from codegen.space import make_config, why_refused
from codegen.variants import VARIANTS
from tests import cases
from tests.configs import OF_FLOAT32
from tests.variant_cases import (
    LIMITS,
    accuracy_of,
    assert_right,
    compiled,
    config_of,
    deterministic_configs,
    each_config,
    fitted,
    is_emulated,
    narrowed,
    pairs,
    problem_of,
)
from tuner.compare import bound_fault, build_case
from tuner.executors import Executor
from tuner.inputs import Inputs, Repeated, random_inputs

WIDTHS = ("threads", "warps", "lanes", "vector", "across", "tile", "teams")
"""Parameters that set how many threads share a sum."""


def widths(variant: str, hidden: int) -> list[Config]:
    """A config for every combination of the parameters that set a width, as far as they suit the length."""
    choices = VARIANTS[variant].choices
    names = [name for name in WIDTHS if name in choices and not (name == "tile" and "lanes" in choices)]
    combinations = (dict(zip(names, values, strict=True)) for values in product(*(choices[name] for name in names)))
    reduction = "two_pass" if "two_pass" in choices["reduction"] else pairs(variant)[0][0]
    configs = (config_of(variant, reduction, **values) for values in combinations)
    return [config for config in configs if why_refused(Problem(5, hidden, 3), config, LIMITS) is None]


@pytest.mark.parametrize(("variant", "hidden"), list(product(OF_FLOAT32, cases.REDUCED_HIDDEN)))
def test_r1_every_width_of_a_reduction(executor: Executor, variant: str, hidden: int) -> None:
    configs = widths(variant, hidden)
    assert configs
    for config in configs:
        assert_right(executor, config, cases.counting_inputs(hidden))


def assert_right_in_any_order(executor: Executor, config: Config, inputs: Inputs) -> None:
    """Every order of threads gives results within their bounds, and the same bits of whatever is not added up by atomics."""
    problem = problem_of(config, inputs)
    program = compiled(executor, problem, config)
    first = None
    for order in ("forward", "reverse", "shuffled:1"):
        got = program.run(inputs, ALL_GRADIENTS, order=order)  # type: ignore[call-arg]
        fault = bound_fault(inputs, got, accuracy=problem.accuracy)
        assert fault is None, f"{order}: {fault}"
        first = first or got
        for name in GRADIENTS if config["reduction"] != "atomic" else ("dx",):
            np.testing.assert_array_equal(getattr(got, name), getattr(first, name), err_msg=f"{order}: {name}")


@each_config
def test_r2_the_order_of_threads_does_not_matter(host_executor: Executor, config: Config) -> None:
    shape = narrowed(cases.BARRIERS, config.variant)
    chosen = fitted(config, shape)
    assert chosen is not None
    assert_right_in_any_order(host_executor, chosen, random_inputs(shape.rows, shape.hidden, shape.out))


ARITHMETIC = {"float32": "fp16x3", "bfloat16": "bf16"}


@pytest.mark.parametrize("dtype", ARITHMETIC)
@pytest.mark.parametrize("stages", VARIANTS["tile_mma"].choices["stages"])
def test_r2_tiles_copied_ahead_are_waited_for(host_executor: Executor, stages: int, dtype: str) -> None:
    shape = cases.MANY_TILES
    config = config_of("tile_mma", "single_block", ARITHMETIC[dtype], dtype, stages=stages, rows=32, warps=4)
    assert why_refused(Problem.of(shape, dtype=dtype), config, LIMITS) is None
    assert_right_in_any_order(host_executor, config, random_inputs(shape.rows, shape.hidden, shape.out, dtype=dtype))


@pytest.mark.parametrize(("dtype", "stages", "split", "finish"), [
    ("float32", 3, "first", "second"), ("float32", 4, "first", "epilogue"), ("float32", 2, "loop", "second"),
    ("bfloat16", 3, "loop", "epilogue"), ("bfloat16", 4, "loop", "second")])
def test_r2_steps_copied_ahead_are_waited_for(host_executor: Executor, dtype: str, stages: int, split: str, finish: str) -> None:
    shape = cases.MANY_STEPS
    config = config_of("gemm_mma", "two_pass", ARITHMETIC[dtype], dtype, stages=stages, split=split, finish=finish, depth=32)
    assert why_refused(Problem.of(shape, dtype=dtype), config, LIMITS) is None
    assert_right_in_any_order(host_executor, config, random_inputs(shape.rows, shape.hidden, shape.out, dtype=dtype))


@pytest.mark.cuda
@each_config
def test_r2_a_hundred_runs_on_many_rows(cuda_executor: Executor, config: Config) -> None:
    shape = cases.BARRIERS_LARGE
    changes: dict[str, Value] = {"warps": 4} if config.variant == "row_warp" else {}
    chosen = fitted(make_config(config.variant, {**config.as_dict(), **changes}), shape)
    if chosen is None:  # w and a tile of rows do not fit on chip
        shape = Shape(1, 8192, 128, 64)
        chosen = fitted(config, shape)
    assert chosen is not None
    inputs = random_inputs(shape.rows, shape.hidden, shape.out)
    problem = problem_of(chosen, inputs)
    program = compiled(cuda_executor, problem, chosen)
    case = build_case("data", Repeated(inputs, np.ones(inputs.rows, np.int8)), ALL_GRADIENTS, problem.accuracy, inputs=inputs)
    for _ in range(100 if chosen.variant != "row_thread" else 5):  # a row_thread of this size takes a second
        reason = case.judge(program.run(inputs, ALL_GRADIENTS)).reason
        assert reason is None, reason


@each_config
def test_r3_outputs_are_set_and_not_added_to(executor: Executor, config: Config) -> None:
    chosen = fitted(config, Shape(1, 100, 24, 16))
    assert chosen is not None
    inputs = random_inputs(100, 24, 16)
    program = compiled(executor, problem_of(chosen, inputs), chosen)
    for _ in range(2):
        got = program.run(inputs, ALL_GRADIENTS, prefill=7.0)  # type: ignore[call-arg]
        assert bound_fault(inputs, got, accuracy=accuracy_of(chosen)) is None


@deterministic_configs
def test_r3_deterministic_kernels_repeat_their_bits(executor: Executor, config: Config) -> None:
    chosen = fitted(config, Shape(1, 300, 40, 24), deterministic=True)
    assert chosen is not None
    inputs = random_inputs(300, 40, 24)
    program = compiled(executor, Problem(300, 40, 24, deterministic=True, accuracy=accuracy_of(chosen)), chosen)
    first = program.run(inputs, ALL_GRADIENTS)
    for _ in range(3 if is_emulated(chosen.variant) and executor.name == "host" else 19):
        again = program.run(inputs, ALL_GRADIENTS)
        for name in GRADIENTS:
            np.testing.assert_array_equal(getattr(first, name), getattr(again, name), err_msg=name)
